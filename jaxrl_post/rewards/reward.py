"""A reward: from prompts and completions to one finite number each, checked on the way in and out."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_post import config
from jaxrl_post.rewards.function import RewardFunction, describe, load_function
from jaxrl_post.rewards.gym import check_gym_row, gym_score
from jaxrl_post.rewards.match import check_answer, check_integer_answer, exact_match, last_number
from jaxrl_post.types import Prompt


class RewardError(ValueError):
    """A grader failed or returned something other than one finite number for each completion."""


@dataclasses.dataclass(frozen=True)
class Reward:
    """`score` grades a batch; `check_row` raises ValueError for a row it could not grade."""

    name: str
    score: RewardFunction
    check_row: Callable[[dict[str, Any]], None]

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        """One finite float for each completion; `prompts[i]` is the prompt of `completions[i]`.

        Completions are text without special tokens. Raises RewardError naming the reward and the sample.
        """
        if len(prompts) != len(completions):
            raise RewardError(f"reward {self.name}: {len(prompts)} prompts for {len(completions)} completions")
        texts, rows = [prompt.text for prompt in prompts], [prompt.row for prompt in prompts]
        try:
            scores = list(self.score(texts, list(completions), rows))
        except RewardError:
            raise
        except (Exception, SystemExit) as error:  # the grader may be anyone's code
            raise RewardError(f"reward {self.name} failed on a batch of {len(texts)}: {describe(error)}") from error
        if len(scores) != len(texts):
            raise RewardError(f"reward {self.name} returned {len(scores)} scores for {len(texts)} completions")
        return [_number(score, f"reward {self.name}, {_sample(completions, i)}") for i, score in enumerate(scores)]

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """To call before the first step: raises ValueError naming the first row that cannot be graded."""
        for number, row in enumerate(rows):
            try:
                self.check_row(row)
            except Exception as error:  # scorers of other packages run here
                question = str(row.get("prompt", row.get("messages")))[:80]
                raise ValueError(f"reward {self.name}: row {number} ({question!r}) {error}") from error


def build(
    reward: config.LastNumberReward | config.ExactMatchReward | config.ReasoningGymReward | config.FunctionReward,
) -> Reward:
    """The reward a recipe's `reward` stands for. Raises ValueError for a function that cannot be imported."""
    match reward:
        case config.LastNumberReward():
            return Reward(reward.kind, one_by_one(reward.kind, last_number), check_integer_answer)
        case config.ExactMatchReward():
            return Reward(reward.kind, one_by_one(reward.kind, exact_match), check_answer)
        case config.ReasoningGymReward():
            grade = functools.partial(gym_score, threshold=reward.threshold)
            return Reward(reward.kind, one_by_one(reward.kind, grade), check_gym_row)
        case config.FunctionReward():
            return Reward(reward.function, load_function(reward.function), lambda row: None)


def one_by_one(name: str, grade: Callable[[str, dict[str, Any]], float]) -> RewardFunction:
    """A grader of (completion, row) as one of batches, whose errors name the sample."""

    def score(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
        scores = []
        for i, (completion, row) in enumerate(zip(completions, rows, strict=True)):
            try:
                scores.append(grade(completion, row))
            except Exception as error:  # a sample's text may break a parser in any way
                raise RewardError(f"reward {name}, {_sample(completions, i)}: {describe(error)}") from error
        return scores

    return score


def _number(score: Any, where: str) -> float:
    if not isinstance(score, numbers.Real | np.bool_) or not math.isfinite(score):
        raise RewardError(f"{where}: returned {score!r}, not a finite number")
    return float(score)


def _sample(completions: Sequence[str], index: int) -> str:
    return f"sample {index} ({completions[index][:80]!r})"
