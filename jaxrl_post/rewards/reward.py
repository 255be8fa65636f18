"""A run's reward: the weighted sum of its graders' scores, which stay known one by one.

Legend: N responses, K graders.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post import config_rewards as config
from jaxrl_post.rewards.function import load_function
from jaxrl_post.rewards.grader import Grader, RewardError, by_text, one_by_one
from jaxrl_post.rewards.gym import check_gym_row, gym_score
from jaxrl_post.rewards.match import check_answer, check_integer_answer, exact_match, last_number
from jaxrl_post.rewards.model import Setting, open_score
from jaxrl_post.types import Response


class Scores(NamedTuple):
    """float64: `total_N`, always finite, and each grader's own `heads_NK`, NaN where it abstained."""

    total_N: np.ndarray
    heads_NK: np.ndarray


@dataclasses.dataclass(frozen=True)
class Reward:
    """Graders and their weights; a recipe's single reward is one grader of weight 1."""

    graders: tuple[Grader, ...]
    weights: tuple[float, ...] = (1.0,)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(grader.name for grader in self.graders)

    def __call__(self, responses: Sequence[Response]) -> Scores:
        """A head that abstains adds nothing. Raises RewardError as a grader, and where every head abstains."""
        heads_NK = np.stack([grader(responses) for grader in self.graders], axis=1)
        silent_N = np.isnan(heads_NK).all(axis=1)
        if silent_N.any():
            i = int(silent_N.argmax())
            raise RewardError(
                f"sample {i} ({responses[i].text[:80]!r}): all rewards ({', '.join(self.names)}) returned None; one at "
                "least must grade each sample"
            )
        return Scores(np.nansum(heads_NK * np.array(self.weights)[None], axis=1), heads_NK)

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """To call before the first step: raises ValueError naming the first row that cannot be graded."""
        for grader in self.graders:
            grader.check_rows(rows)


def build(reward: config.SingleReward | config.WeightedReward, setting: Setting) -> Reward:
    """The reward a recipe's `reward` stands for; a reward model's weights are read at its first call.

    Raises: ValueError for a function that cannot be imported and as `open_score`.
    """
    singles = config.single_rewards(reward)
    if not isinstance(reward, config.WeightedReward):
        return Reward((_grader(reward, _name(reward), "reward", setting),))
    graders = [
        dataclasses.replace(_grader(single, name, section, setting), may_abstain=True)
        for name, (section, single) in zip(reward.parts, singles.items(), strict=True)
    ]
    return Reward(tuple(graders), tuple(part.weight for part in reward.parts.values()))


def _name(reward: config.SingleReward) -> str:
    return reward.function if isinstance(reward, config.FunctionReward) else reward.kind


def _grader(reward: config.SingleReward, name: str, section: str, setting: Setting) -> Grader:
    match reward:
        case config.LastNumberReward():
            return Grader(name, one_by_one(name, last_number), check_integer_answer)
        case config.ExactMatchReward():
            return Grader(name, one_by_one(name, exact_match), check_answer)
        case config.ReasoningGymReward():
            grade = functools.partial(gym_score, threshold=reward.threshold)
            return Grader(name, one_by_one(name, grade), check_gym_row)
        case config.FunctionReward():
            return Grader(name, by_text(load_function(reward.function, section)))
        case config.ModelReward():
            return Grader(name, open_score(reward, setting, section), on_mesh=True)
