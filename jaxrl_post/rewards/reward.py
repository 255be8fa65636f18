"""A run's reward: the weighted sum of its graders' scores, which stay known one by one.

Legend: N responses, K graders.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post import config_rewards as config
from jaxrl_post.rewards import code
from jaxrl_post.rewards.ahead import Ahead
from jaxrl_post.rewards.call import RewardError, answer
from jaxrl_post.rewards.function import load_function
from jaxrl_post.rewards.grader import GRADED, CheckRow, Early, Grader, accept_row, by_array, by_calls, one_by_one
from jaxrl_post.rewards.gym import check_gym_row
from jaxrl_post.rewards.match import check_answer, check_integer_answer, exact_match, last_number
from jaxrl_post.rewards.model import Setting, open_score
from jaxrl_post.rewards.pool import Pool
from jaxrl_post.rewards.worker import Target
from jaxrl_post.types import Response

log = logging.getLogger(__name__)
MOST_WORKERS = 8  # where a recipe does not say how many


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

    def collect(self) -> dict[str, float]:
        """Samples that graders failed at since the last call, of those that can: all, hung and crashed ones; and if any
        of them failed at all of its samples."""
        counts = [grader.faults for grader in self.graders if grader.failure_score is not None]
        if not counts:
            return {}
        told = {"failed": ("error", "timeout", "crash"), "timeouts": ("timeout",), "crashes": ("crash",)}
        sums = {name: sum(count[kind] for count in counts for kind in kinds) for name, kinds in told.items()}
        everything = any(0 < count[GRADED] == sum(count[kind] for kind in told["failed"]) for count in counts)
        for count in counts:
            count.clear()
        return {f"reward/{name}": float(total) for name, total in (sums | {"all_failed": everything}).items()}

    @property
    def early(self) -> bool:
        """Whether any grader takes samples while others are still being sampled."""
        return any(grader.early for grader in self.graders)

    def begin(self, groups: Sequence[Sequence[Response | None]]) -> None:
        """Let those graders begin, as `ahead.Ahead.begin`."""
        for grader in self.graders:
            if grader.early:
                grader.early.begin(groups)

    def early_seconds(self) -> float:
        """How long the busiest of them has been grading since the run began."""
        return max((grader.early.seconds() for grader in self.graders if grader.early), default=0.0)

    def close(self) -> None:
        """End the graders' processes."""
        for grader in self.graders:
            grader.close()


def build_reward(reward: config.SingleReward | config.WeightedReward, setting: Setting) -> Reward:
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
            return Grader(name, one_by_one(last_number), check_integer_answer)
        case config.ExactMatchReward():
            return Grader(name, one_by_one(exact_match), check_answer)
        case config.ReasoningGymReward():
            target = Target("jaxrl_post.rewards.gym:gym_scores", {"threshold": reward.threshold})
            return _in_workers(reward, name, target, "sample", setting, check_gym_row)
        case config.FunctionReward():
            load_function(reward.function, section)
            return _in_workers(reward, name, Target(reward.function, {}), reward.per, setting)
        case config.CodeReward():
            options = code.Options(reward.sandbox, reward.tests_key, reward.score, reward.seconds, reward.memory_mb)
            code.open_sandbox(options)
            if setting.deterministic:
                log.warning(
                    "debug.deterministic=true: %s.seconds=%g of a test is measured by the clock; a program that takes "
                    "about as long may pass or fail", section, reward.seconds,
                )  # fmt: skip
            target = Target("jaxrl_post.rewards.code:code_scores", options._asdict())
            check = functools.partial(code.read_tests, key=reward.tests_key)
            return _in_workers(reward, name, target, "sample", setting, check)
        case config.ModelReward():
            return Grader(name, by_array(open_score(reward, setting, section)), on_mesh=True)


def _in_workers(
    reward: config.ForeignCode,
    name: str,
    target: Target,
    per: config.Part,
    setting: Setting,
    check_row: CheckRow = accept_row,
) -> Grader:
    if reward.workers == 0:
        function = target.load()
        here = by_calls(lambda calls: [answer(function, call) for call in calls], per)
        return Grader(name, here, check_row, failure_score=reward.failure_score)
    workers = reward.workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    pool = Pool(name, target, workers, reward.timeout)
    ahead = Ahead(pool, per)
    early = Early(ahead.begin, lambda: pool.seconds) if reward.grades_early(setting.early) else None
    return Grader(
        name, ahead, check_row, failure_score=reward.failure_score, no_clock=setting.deterministic, close=pool.close,
        early=early,
    )  # fmt: skip
