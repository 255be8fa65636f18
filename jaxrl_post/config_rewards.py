"""What grades a run's samples: one reward, or several with weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from jaxrl_post.config_base import Count, Fraction, FunctionPath, Positive, Section, default_kind


class LastNumberReward(Section):
    """1 when the last integer in the completion equals the row's `answer`, else 0."""

    kind: Literal["last_number"] = "last_number"


class ExactMatchReward(Section):
    """1 when the completion, stripped of white space, equals the row's `answer`, else 0."""

    kind: Literal["exact_match"]


Part = Literal["sample", "group", "step"]


class ForeignCode(Section):
    """Graded by code that a model's answer may hang or crash, in processes that can be killed.

    A sample whose grading takes too long, ends its process, raises, or gives no finite number or the wrong count of
    them gets `failure_score` and is counted in `reward/failed` (and `reward/timeouts`, `reward/crashes`); no other
    sample is affected. When all samples of a batch raise the grader is broken, and the run ends.
    """

    workers: Count | None = None
    """Processes that grade; null is one for each core, at most 8. 0 grades in the run's own: without a limit."""
    timeout: Positive = 10.0
    """Seconds that grading one sample may take; its worker is then killed and replaced."""
    failure_score: float | None = 0.0
    """What a sample gets that could not be graded; null ends the run instead."""
    early: Literal["auto"] | bool = "auto"
    """Grade samples while others are still sampled: the rollout runs as several programs, and what each has finished is
    graded meanwhile. Scores are the same. `auto` does so where accelerators sample and the workers have the host for
    themselves; not on CPUs, with `rollout.partial` or for a function `per` step."""

    @model_validator(mode="after")
    def _can_be_early(self) -> ForeignCode:
        if self.early is True and self.workers == 0:
            raise ValueError("early=true grades in worker processes, and workers=0 has none: raise workers")
        return self

    def grades_early(self, auto: bool) -> bool:
        """Whether samples are graded while others are sampled, where `early: auto` means `auto`."""
        return self.workers != 0 and (auto if self.early == "auto" else self.early)


class ReasoningGymReward(ForeignCode):
    """The task's own scorer on the text inside <answer>…</answer> (or the whole text); binary at `threshold`."""

    kind: Literal["reasoning_gym"]
    threshold: Fraction | None = 0.99
    """Scores at or above become 1, others 0; null keeps the scorer's value."""


class FunctionReward(ForeignCode):
    """`module:function` called with (prompts, completions, rows); returns one float per completion.

    Each worker imports the module anew, so what it keeps in globals is the worker's own.
    """

    kind: Literal["function"]
    function: FunctionPath
    per: Part = "sample"
    """What one call grades, in lists of that length: a sample, a prompt's group, for functions that compare samples,
    or all of a step. Limit and failures are those of a call; its limit is `timeout` for each sample in it."""

    @model_validator(mode="after")
    def _parts_are_early(self) -> FunctionReward:
        if self.early is True and self.per == "step":
            raise ValueError("early=true cannot be with per=step, which waits for all samples: set per=group")
        return self

    def grades_early(self, auto: bool) -> bool:
        return self.per != "step" and super().grades_early(auto)


class CodeReward(ForeignCode):
    """Runs the Python in a completion (its last fenced block, or all of it) on the tests of its row, in a sandbox.

    A row's tests are a list; each is Python that runs after the program and must not fail (`assert f(2) == 4`), or
    {"input": text, "output": text} for a program that reads and prints. `timeout` is for all tests of a sample.
    """

    kind: Literal["code"]
    sandbox: Literal["monty", "bubblewrap"] = "monty"
    """monty (extra `[code]`) knows a part of Python and starts in milliseconds; bubblewrap, where that program is
    installed, is full CPython with its standard library in 0.1 s. Neither has network, files or processes."""
    tests_key: Annotated[str, Field(min_length=1)] = "tests"
    score: Literal["all", "share"] = "all"
    """1 when all tests pass, or the share of those that do."""
    seconds: Positive = 2.0
    """That one test may take."""
    memory_mb: Annotated[int, Field(ge=64)] = 256
    """MiB that a program may take."""


class ModelReward(Section):
    """The score of a reward model, as trained by a recipe of `algorithm.kind: reward_model`, on the run's own mesh.

    It reads the sampled token ids, so its tokenizer must be the policy's.
    """

    kind: Literal["model"]
    run_dir: str
    """The run_dir of the recipe that trained it; its newest checkpoint is taken."""
    tokens_per_batch: PositiveInt = 4096
    """Token positions a device holds in one forward pass."""


SingleReward = LastNumberReward | ExactMatchReward | ReasoningGymReward | FunctionReward | CodeReward | ModelReward


class RewardPart(Section):
    """One of several rewards."""

    weight: float = 1.0
    """In the sum; 0 measures the part and trains on the others, below 0 it is a punishment."""
    reward: Annotated[SingleReward, Field(discriminator="kind")]


class WeightedReward(Section):
    """Σ weight · score over named parts; `algorithm.kind: gdpo` compares them one by one.

    A function may return None for a sample that it has nothing to say of; it then adds nothing to that sample's sum.
    """

    kind: Literal["weighted"]
    parts: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$")], RewardPart] = Field(min_length=1)
    """By name, under which each is measured: critic/score/NAME/mean."""

    @model_validator(mode="after")
    def _a_weight(self) -> WeightedReward:
        if not any(part.weight for part in self.parts.values()):
            raise ValueError("reward.parts all have weight=0, which leaves nothing to learn: give one another weight")
        return self


Reward = Annotated[SingleReward | WeightedReward, Field(discriminator="kind"), default_kind("last_number")]


def single_rewards(reward: SingleReward | WeightedReward) -> dict[str, SingleReward]:
    """The rewards that look at samples, each by its section's dotted name."""
    if isinstance(reward, WeightedReward):
        return {f"reward.parts.{name}.reward": part.reward for name, part in reward.parts.items()}
    return {"reward": reward}
