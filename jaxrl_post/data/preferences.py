"""Rows of an offline recipe as examples: tokenised, cut to length, and counted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxrl_post.config import JsonlTask
from jaxrl_post.config_offline import OfflineConfig, OfflineData
from jaxrl_post.config_teachers import Taught
from jaxrl_post.data.conversations import conversation, prompt_and_answer
from jaxrl_post.data.jsonl import Row, read_rows
from jaxrl_post.data.lessons import lesson_of
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.types_offline import Answer, Example

Reader = Callable[[Row, Tokenizer, OfflineData], Example]


class Report(NamedTuple):
    """Examples kept, examples dropped because an answer lost all its tokens, and examples with a shortened answer."""

    kept: int
    dropped: int
    cut: int


def load_examples(
    config: OfflineConfig, tokenizer: Tokenizer, key: Literal["path", "held_out_path"] = "path"
) -> tuple[list[Example], Report, list[str]]:
    """The examples of `data.path` (or `data.held_out_path`) in the form `algorithm.kind` learns from, and
    `file:line: why` of lines skipped.

    Raises: ValueError naming the file and row: no such file, a row of another form, none left after cutting.
    """
    data = config.data
    path, place = getattr(data, key), f"data.{key}={getattr(data, key)!r}"
    rows, skipped = read_rows(path, JsonlTask(kind="jsonl", path=path, on_bad_row=data.on_bad_row), f"data.{key}")
    read = reader(config.algorithm.kind)
    if isinstance(config.algorithm, Taught):
        read = with_lesson(read, config.algorithm)
    examples = []
    for number, row in enumerate(rows):
        try:
            examples.append(read(row, tokenizer, data))
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{place}, row {number}: {_reason(error)}"
            if data.on_bad_row == "error":
                raise ValueError(f"{problem}. Mend the row, or set data.on_bad_row=skip") from error
            skipped.append(problem)
    kept, report = cut_all(examples, data.max_tokens)
    if not kept:
        raise ValueError(
            f"{place}: {len(rows)} rows read, {len(skipped)} skipped, {report.dropped} dropped as no "
            f"answer token lies within data.max_tokens={data.max_tokens}, none left"
        )
    return kept, report, skipped


def hold_out(examples: Sequence[Example], fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Examples to learn from and those held out: all of `fraction` of the distinct prompts, drawn by `seed`.

    A prompt is on one side only, so none that was trained on is tested. Order is kept on both sides.
    Raises: ValueError when either side would be empty.
    """
    prompts = list(dict.fromkeys(example.prompt_ids for example in examples))
    count = round(fraction * len(prompts))
    if not 0 < count < len(prompts):
        raise ValueError(
            f"data.held_out_fraction={fraction} of {len(prompts)} distinct prompts is {count}, and both sides need at "
            "least one: give another share, or a file as data.held_out_path"
        )
    order = np.random.default_rng(seed).permutation(len(prompts))
    tested = {prompts[i] for i in order[:count]}
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        sides[example.prompt_ids in tested].append(example)
    return sides


def reader(kind: str) -> Reader:
    """What turns a row into an example of this `algorithm.kind`."""
    return {"sft": conversation, "sft_distillation": conversation, "kto": labelled}.get(kind, pair)


def with_lesson(read: Reader, taught: Taught) -> Reader:
    """Examples with their teacher and the prompt it sees. Raises: ValueError as `lesson_of`."""

    def taught_example(row: Row, tokenizer: Tokenizer, data: OfflineData) -> Example:
        lesson = lesson_of(row, taught, lambda seen: read(seen, tokenizer, data).prompt_ids)
        return dataclasses.replace(read(row, tokenizer, data), lesson=lesson)

    return taught_example


def pair(row: Row, tokenizer: Tokenizer, data: OfflineData) -> Example:
    """{prompt, chosen, rejected} and perhaps a finite `margin`."""
    _need(row, "chosen", "rejected")
    prompt, chosen = prompt_and_answer(row, row["chosen"], tokenizer, data)
    _, rejected = prompt_and_answer(row, row["rejected"], tokenizer, data)
    margin = row.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(f"margin={margin!r} is not a finite number")
    return Example(prompt, (chosen, rejected), margin=float(margin))


def labelled(row: Row, tokenizer: Tokenizer, data: OfflineData) -> Example:
    """{prompt, completion, label}."""
    _need(row, "completion", "label")
    if not isinstance(row["label"], bool):
        raise ValueError(f"label={row['label']!r} must be true or false")
    prompt, answer = prompt_and_answer(row, row["completion"], tokenizer, data)
    return Example(prompt, (answer,), desirable=row["label"])


def cut_all(examples: Sequence[Example], max_tokens: int) -> tuple[list[Example], Report]:
    """Examples cut by `cut`, without those that lost a whole answer."""
    cuts = [cut(example, max_tokens) for example in examples]
    kept = [example for example in cuts if all(answer.length for answer in example.answers)]
    shortened = sum(after.ids != before.ids for after, before in zip(cuts, examples, strict=True))
    dropped = len(cuts) - len(kept)
    return kept, Report(len(kept), dropped, shortened - dropped)


def cut(example: Example, max_tokens: int) -> Example:
    """Prompt and answer within `max_tokens`, each answer by itself; an answer may be left with no token."""
    room = max(max_tokens - len(example.prompt_ids), 0)
    answers = tuple(Answer(answer.ids[:room], answer.trained[:room]) for answer in example.answers)
    return dataclasses.replace(example, answers=answers)


def mismatched(examples: Sequence[Example], max_tokens: int) -> list[Example]:
    """Each prompt with the answer of the example before it: what KTO takes its reference point from."""
    answers = [example.answers for example in examples]
    shifted = [answers[-1], *answers[:-1]]
    return [cut(Example(e.prompt_ids, other), max_tokens) for e, other in zip(examples, shifted, strict=True)]


def _need(row: Row, *keys: str) -> None:
    missing = [key for key in keys if key not in row]
    if missing:
        raise ValueError(f"lacks {' and '.join(missing)}; it has {sorted(row)}")


def _reason(error: Exception) -> str:
    return f"lacks {error}" if isinstance(error, KeyError) else str(error)
