"""Programs that a model wrote, graded by tests; they run only in a sandbox (`code_monty`, `code_bubblewrap`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from jaxrl_post.rewards import code_bubblewrap, code_monty
from jaxrl_post.rewards.code_case import Case, Limits

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE)
LONGEST = 1 << 16  # characters of a program

Runs = Callable[[str, Case], bool]  # whether a program passes a test


class Options(NamedTuple):
    """How a recipe wants it, as text and numbers."""

    sandbox: Literal["monty", "bubblewrap"]
    tests_key: str
    score: Literal["all", "share"]
    seconds: float
    memory_mb: int

    @property
    def limits(self) -> Limits:
        return Limits(self.seconds, self.memory_mb << 20)


def extract_program(completion: str) -> str:
    """The last fenced block of Python, or of no language; the whole completion where there is none."""
    found = _FENCE.findall(completion)
    return str(found[-1]) if found else completion


def open_sandbox(options: Options) -> Runs:
    """Raises: ValueError where the sandbox is not installed or does not work here."""
    match options.sandbox:
        case "monty":
            return functools.partial(code_monty.passes, code_monty.open_pool(), options.limits)
        case "bubblewrap":
            return functools.partial(code_bubblewrap.passes, code_bubblewrap.command(options.limits), options.limits)


def code_scores(prompts: list[str], completions: list[str], rows: list[dict[str, Any]], **options: Any) -> list[float]:
    """A reward function, in [0, 1]: the share of its row's tests that a completion's program passes, or 1 for all."""
    wanted = Options(**options)
    runs = _opened(wanted)
    return [_score(runs, wanted, text, row) for text, row in zip(completions, rows, strict=True)]


_opened = functools.cache(open_sandbox)  # once in each worker process


def _score(runs: Runs, options: Options, completion: str, row: dict[str, Any]) -> float:
    program, tests = extract_program(completion), read_tests(row, options.tests_key)
    if len(program) > LONGEST or "\0" in program:
        return 0.0
    if options.score == "all":
        return float(all(runs(program, test) for test in tests))
    return sum(runs(program, test) for test in tests) / len(tests)


def read_tests(row: dict[str, Any], key: str) -> Sequence[Case]:
    """The tests of a row: each a text of Python that runs after the program, or {"input": text, "output": text}.

    Raises: ValueError for a row without, or with anything else.
    """
    tests = row.get(key)
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"has {key}={tests!r:.80}, not a list of tests (reward.tests_key); its keys are {sorted(row)}")
    return [_read_test(test, key) for test in tests]


def _read_test(test: Any, key: str) -> Case:
    if isinstance(test, str) and test.strip() and "\0" not in test:
        return Case(after=test)
    if isinstance(test, dict) and test.keys() == {"input", "output"} and all(isinstance(x, str) for x in test.values()):
        return Case(given=test["input"], printed=test["output"])
    raise ValueError(f"has a test in {key} that is neither Python nor {{'input': text, 'output': text}}: {test!r:.80}")
