"""A grader: from responses to one finite number each, checked on the way in and out.

Legend: N responses.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_post.rewards.function import RewardFunction, describe
from jaxrl_post.types import Response
from sharding.processes import split_work

Score = Callable[[Sequence[Response]], Sequence[Any] | np.ndarray]
CheckRow = Callable[[dict[str, Any]], None]


class RewardError(ValueError):
    """A grader failed or returned something other than one finite number for each completion."""


def accept_row(row: dict[str, Any]) -> None:
    """Of graders that ask nothing of a row."""


@dataclasses.dataclass(frozen=True)
class Grader:
    """`score` grades a batch; `check_row` raises ValueError for a row it could not grade.

    Where it `may_abstain` a score of None says that it has nothing to say of a response. One that is `on_mesh`, a
    model, is run by all processes together; of the others' work each does its share, in whole groups of a prompt.
    """

    name: str
    score: Score
    check_row: CheckRow = accept_row
    may_abstain: bool = False
    on_mesh: bool = False

    def __call__(self, responses: Sequence[Response]) -> np.ndarray:
        """float64 [N], NaN where the grader abstains.

        Raises: RewardError naming the reward and the sample; PeerError where another process did.
        """
        if self.on_mesh:
            return self._graded(responses)
        groups = [list(group) for _, group in itertools.groupby(responses, key=lambda response: id(response.prompt))]
        scores = split_work(groups, lambda part: [self._graded(list(itertools.chain(*part))).tolist()] if part else [])
        return np.array(list(itertools.chain(*scores)), np.float64)

    def _graded(self, responses: Sequence[Response]) -> np.ndarray:
        try:
            scores = list(self.score(responses))
        except RewardError:
            raise
        except (Exception, SystemExit) as error:  # the grader may be anyone's code
            raise RewardError(f"reward {self.name} failed on a batch of {len(responses)}: {describe(error)}") from error
        if len(scores) != len(responses):
            raise RewardError(f"reward {self.name} returned {len(scores)} scores for {len(responses)} completions")
        return np.array([self._number(score, responses, i) for i, score in enumerate(scores)], np.float64)

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """To call before the first step: raises ValueError naming the first row that cannot be graded."""
        for number, row in enumerate(rows):
            try:
                self.check_row(row)
            except Exception as error:  # scorers of other packages run here
                question = str(row.get("prompt", row.get("messages")))[:80]
                raise ValueError(f"reward {self.name}: row {number} ({question!r}) {error}") from error

    def _number(self, score: Any, responses: Sequence[Response], i: int) -> float:
        if score is None and self.may_abstain:
            return math.nan
        if not isinstance(score, numbers.Real | np.bool_) or not math.isfinite(score):
            raise RewardError(
                f"reward {self.name}, {_sample(responses[i].text, i)}: returned {score!r}, not a finite number"
            )
        return float(score)


def by_text(function: RewardFunction) -> Score:
    """A function of (prompts, completions, rows), all text, as a grader's score."""

    def score(responses: Sequence[Response]) -> Sequence[float | None]:
        prompts = [response.prompt for response in responses]
        return function([p.text for p in prompts], [r.text for r in responses], [p.row for p in prompts])

    return score


def one_by_one(name: str, grade: Callable[[str, dict[str, Any]], float]) -> Score:
    """A grade of (completion, row) as a grader's score, whose errors name the sample."""

    def score(responses: Sequence[Response]) -> list[float]:
        scores = []
        for i, response in enumerate(responses):
            try:
                scores.append(grade(response.text, response.prompt.row))
            except Exception as error:  # a sample's text may break a parser in any way
                raise RewardError(f"reward {name}, {_sample(response.text, i)}: {describe(error)}") from error
        return scores

    return score


def _sample(text: str, index: int) -> str:
    return f"sample {index} ({text[:80]!r})"
