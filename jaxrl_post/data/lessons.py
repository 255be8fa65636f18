"""Which teacher grades a row's answers, and the row as that teacher sees it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from jaxrl_post import config
from jaxrl_post.config_teachers import Demonstrated, Taught
from jaxrl_post.data.jsonl import Row
from jaxrl_post.data.prompts import prompt_of
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.types import Lesson, Prompt

PLACEHOLDER = re.compile(r"\{(demonstration|prompt)\}")


def with_lessons(prompts: Sequence[Prompt], taught: Taught, tokenizer: Tokenizer, data: config.Data) -> list[Prompt]:
    """The prompts, each with its teacher and what that sees. Raises: ValueError naming the row at fault."""
    return [dataclasses.replace(prompt, lesson=_lesson(prompt, taught, tokenizer, data)) for prompt in prompts]


def choose(row: Row, taught: Taught) -> tuple[int, Demonstrated]:
    """Number and options of the row's teacher. Raises: ValueError for a tag that names none."""
    names = list(taught.by_tag)
    tag = row.get(taught.teacher_key) if taught.teachers else names[0]
    if tag not in names:
        given = f"{taught.teacher_key}={tag!r} names no teacher" if tag is not None else f"lacks {taught.teacher_key!r}"
        raise ValueError(
            f"{given}: the row's field {taught.teacher_key!r} (teacher_key) says which of the teachers "
            f"{', '.join(names)} grades it"
        )
    return names.index(tag), taught.by_tag[tag]


def shown(row: Row, teacher: Demonstrated) -> Row:
    """The row as the teacher sees it: its text prompt, or first user turn, joined with the demonstration.

    Raises: ValueError where the row has no such text or no user turn.
    """
    if teacher.demonstration is None:
        return row
    text = row.get(teacher.demonstration)
    if not isinstance(text, str):
        raise ValueError(
            f"has no text field {teacher.demonstration!r}, the teacher's demonstration; it has {', '.join(sorted(row))}"
        )
    join = lambda prompt: PLACEHOLDER.sub(
        lambda found: {"demonstration": text, "prompt": prompt}[found[1]], teacher.template
    )
    key = "messages" if "messages" in row else "prompt"
    if isinstance(row[key], str):
        return row | {key: join(row[key])}
    turns = [dict(message) for message in row[key]]
    asked = next((turn for turn in turns if turn["role"] == "user"), None)
    if asked is None:
        raise ValueError("has no user turn that the teacher's demonstration could stand in")
    asked["content"] = join(asked["content"])
    return row | {key: turns}


def lesson_of(row: Row, taught: Taught, prompt_ids: Callable[[Row], tuple[int, ...]]) -> Lesson:
    """The row's lesson; `prompt_ids` tokenises its prompt. Raises: ValueError as `choose`, `shown` and `prompt_ids`."""
    number, teacher = choose(row, taught)
    seen = shown(row, teacher)
    return Lesson(number, None if seen is row else prompt_ids(seen))


def _lesson(prompt: Prompt, taught: Taught, tokenizer: Tokenizer, data: config.Data) -> Lesson:
    try:
        return lesson_of(prompt.row, taught, lambda row: prompt_of(row, tokenizer, data, "as the teacher sees it").ids)
    except ValueError as error:
        raise ValueError(f"the row with prompt {prompt.row.get('prompt', prompt.text)!r}: {error}") from None
