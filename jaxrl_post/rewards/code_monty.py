"""Programs in Monty, an interpreter in Rust of a part of Python, which has no files, network or processes at all.

It knows functions, classes and a few modules (math, re, json, …); others are an ImportError and the program fails. A
test takes about 3 ms. Its worker processes belong to the pool that is opened.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from jaxrl_post.rewards.code_case import Case, Limits


def open_pool() -> Any:
    """Raises: ValueError without the package."""
    try:
        monty = importlib.import_module("pydantic_monty")
    except ImportError:
        raise ValueError(
            "reward.sandbox=monty needs the package pydantic-monty: pip install 'jaxrl-post[code]', or take "
            "reward.sandbox=bubblewrap"
        ) from None
    return monty.Monty(min_processes=1, max_processes=1).__enter__()  # ends with this process


def passes(pool: Any, limits: Limits, program: str, test: Case) -> bool:
    """Whether the program passes, in a fresh session; a limit reached or a crash of the interpreter is no."""
    monty = importlib.import_module("pydantic_monty")
    printed, lines = monty.CollectString(), _lines(test.given)
    allowed = {"max_feed_duration_secs": limits.seconds, "max_memory": limits.memory}
    try:
        with pool.checkout(limits=allowed) as session:
            session.feed_run(program, print_callback=printed, external_lookup={"input": lambda *_: _next(lines)})
            if test.after is None:
                return test.printed_right(printed.output)
            session.feed_run(test.after, print_callback=printed)
            return True
    except monty.MontyError:
        return False


def _lines(text: str) -> Iterator[str]:
    return iter(text.splitlines())


def _next(lines: Iterator[str]) -> str:
    for line in lines:
        return line
    raise EOFError("EOF when reading a line")
