"""Who a student is distilled from: models of any size, the run's own first weights, or the policy with a demonstration.

Sections that hold teachers are `Taught`; what they do with them is theirs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxrl_post.config_base import NonNegative, Section, default_kind
from jaxrl_post.config_model import Dtype, RandomModel

TEMPLATE = "{demonstration}\n\n{prompt}"


class Demonstrated(Section):
    """A teacher may see more than the student: its prompt, and so its log-probs of the student's tokens, are others."""

    demonstration: str | None = None
    """The row's field with a text put before the teacher's prompt; null shows it the student's prompt."""
    template: str = TEMPLATE
    """How the two are joined: the text of the teacher's first user turn."""

    @model_validator(mode="after")
    def _placeholders(self) -> Demonstrated:
        if "{demonstration}" not in self.template or "{prompt}" not in self.template:
            raise ValueError(f"template={self.template!r} must contain both {{demonstration}} and {{prompt}}")
        if self.demonstration is None and self.template != TEMPLATE:
            raise ValueError(f"template={self.template!r} joins a demonstration, and demonstration=null names none")
        return self


class ModelTeacher(Demonstrated):
    """Another model, frozen."""

    kind: Literal["model"] = "model"
    path: str | None = None
    """A Hugging Face folder, or a name `launch fetch` knows; its vocabulary must be the student's."""
    random: RandomModel | None = None
    """Instead of `path`: a random model over the student's vocabulary."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of a random model's weights."""
    dtype: Dtype = "auto"
    """The teacher is held and computes in it; `auto` is bfloat16 on accelerators and float32 on CPU."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelTeacher:
        if (self.path is None) == (self.random is None):
            raise ValueError("a teacher of kind model has exactly one of path and random: give one, set the other null")
        return self


class StartTeacher(Demonstrated):
    """The weights this run starts from, frozen, in the student's compute dtype."""

    kind: Literal["start"]


class SelfTeacher(Demonstrated):
    """The policy itself as it is at each update, a constant there, seeing a demonstration (self-distillation)."""

    kind: Literal["self"]
    demonstration: str = "demonstration"
    """The row's field with a text put before the teacher's prompt."""


Teacher = Annotated[ModelTeacher | StartTeacher | SelfTeacher, Field(discriminator="kind"), default_kind("model")]


class Taught(Section):
    """One teacher of all rows, or several by a tag of each row."""

    teacher: Teacher | None = None
    """Of every row."""
    teachers: dict[str, Teacher] | None = Field(default=None, min_length=1)
    """Instead of `teacher`: teachers by tag; each grades the rows that name it."""
    teacher_key: str = "teacher"
    """The row's field with the tag, where there are `teachers`."""

    @model_validator(mode="after")
    def _one_or_several(self) -> Taught:
        if (self.teacher is None) == (self.teachers is None):
            raise ValueError(
                "distillation has exactly one of teacher (of all rows) and teachers (by a tag of each row)"
            )
        return self

    @property
    def by_tag(self) -> dict[str, ModelTeacher | StartTeacher | SelfTeacher]:
        """All teachers; a single one is called `teacher`."""
        return self.teachers or ({"teacher": self.teacher} if self.teacher else {})


class TaughtAdvantage(Taught):
    """On-policy distillation by the advantage (slime's --use-opd): A_t − coef · (log π_old − log π_teacher).

    Token by token, of the sampled tokens, after the method's own advantage is made (and whitened).
    """

    coef: NonNegative = 1.0
    """λ of the log-ratio to the teacher; 1 with reward_weight=0 descends the reverse KL."""
    reward_weight: NonNegative = 1.0
    """Of the method's own advantage; 0 distils alone, and the reward is only measured."""
