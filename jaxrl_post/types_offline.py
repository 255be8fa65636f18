"""Records of the offline half: examples on the host, packed examples on the devices.

Legend: A micro-batches, B rows, M targets of a row, E examples of a row, K answers of an example (2 for a pair).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxrl_post.types import Lesson, TeacherView, TrainBatch


@dataclasses.dataclass(frozen=True)
class Answer:
    """What follows a prompt: token ids, and for each whether it is learned (not so for later user turns)."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]

    @property
    def length(self) -> int:
        """Trained tokens."""
        return sum(self.trained)


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt with K answers: 1 for fine-tuning and labelled answers, (chosen, rejected) for a pair.

    `desirable` is the label of a labelled answer, `margin` by how much the chosen answer should win, `lesson` what a
    teacher makes of the prompt.
    """

    prompt_ids: tuple[int, ...]
    answers: tuple[Answer, ...]
    desirable: bool = True
    margin: float = 0.0
    lesson: Lesson = dataclasses.field(default=Lesson())

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """All tokens: what tells examples apart."""
        return (self.prompt_ids, *(answer.ids for answer in self.answers))

    @property
    def size(self) -> int:
        """Columns of a row it takes, also with the prompt that a teacher sees."""
        prompt = max(len(self.prompt_ids), len(self.lesson.prompt_ids or ()))
        return prompt + sum(len(answer.ids) for answer in self.answers)

    @property
    def targets(self) -> int:
        """Trained tokens of all answers."""
        return sum(answer.length for answer in self.answers)


class ExampleFields(NamedTuple):
    """What a row says of its examples, [A, B, E]; zeros where a row has fewer.

    weight float32: the example's share of the loss, 1 over the examples of the update, so that sums over any split add
    up to the mean; share float32: the same over the examples of the same label; desirable bool; margin float32; last
    int32 [A, B, E·K]: the column of each answer's last token.
    """

    weight: Any
    share: Any
    desirable: Any
    margin: Any
    last: Any


class OfflineBatch(NamedTuple):
    """Rows of one update. In `rows` the answer k of a row's example e is sequence e·K + k; `weight` there is that of
    the NLL: a token's share where it belongs to a first answer (the only one, or the chosen one), else 0."""

    rows: TrainBatch
    examples: ExampleFields


class TaughtExamples(NamedTuple):
    """An `OfflineBatch` and what teachers read of its rows."""

    rows: TrainBatch
    examples: ExampleFields
    view: TeacherView
