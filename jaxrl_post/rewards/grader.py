"""A grader: from responses to one finite number each, checked on the way in and out.

Legend: N responses.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.config_rewards import Part
from jaxrl_post.rewards.call import Call, Graded, RewardError, Run, graded
from jaxrl_post.rewards.function import describe
from jaxrl_post.types import Response
from sharding.processes import split_work

log = logging.getLogger(__name__)
Score = Callable[[Sequence[Response]], Sequence[Graded]]
Begin = Callable[[Sequence[Sequence[Response | None]]], None]
GRADED = "graded"
CheckRow = Callable[[dict[str, Any]], object]


def accept_row(row: dict[str, Any]) -> None:
    """Of graders that ask nothing of a row."""


def nothing_open() -> None:
    """Of graders that hold no process."""


class Early(NamedTuple):
    """Of graders that take a step's samples as they come: `begin` as `ahead.Ahead.begin`, and the `seconds` in which
    any was being graded."""

    begin: Begin
    seconds: Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Grader:
    """`score` grades a batch; `check_row` raises ValueError for a row it could not grade; `close` ends its processes.
    With `early` the grading of a batch may begin before all of it is there.

    A sample that it fails at gets `failure_score` and is counted in `faults`, by kind; None makes that an error,
    as does `no_clock` of one that hangs.
    Where it `may_abstain` a score of None says that it has nothing to say of a response. One that is `on_mesh`, a
    model, is run by all processes together; of the others' work each does its share, in whole groups of a prompt.
    """

    name: str
    score: Score
    check_row: CheckRow = accept_row
    may_abstain: bool = False
    on_mesh: bool = False
    failure_score: float | None = None
    no_clock: bool = False
    close: Callable[[], object] = nothing_open
    early: Early | None = None
    faults: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )  # `GRADED`: samples in all

    def __call__(self, responses: Sequence[Response]) -> np.ndarray:
        """float64 [N], NaN where the grader abstains.

        Raises: RewardError naming the reward and the sample, also when no sample at all could be graded and none of
        them hung or crashed: it is the grader that is broken then; PeerError where another process did.
        """
        if self.on_mesh:
            results = self._graded(responses)
        else:
            groups = _grouped(responses)
            parts = split_work(groups, lambda part: [self._graded(list(itertools.chain(*part)))] if part else [])
            results = [Graded(*one) for one in itertools.chain(*parts)]
        self._tell_faults(results, responses)
        self.faults[GRADED] += len(results)
        fallback = math.nan if self.failure_score is None else self.failure_score
        scores = [fallback if one.fault else math.nan if one.score is None else one.score for one in results]
        return np.array(scores, np.float64)

    def _graded(self, responses: Sequence[Response]) -> list[Graded]:
        results = [self._abstains_rightly(one) for one in self.score(responses)]
        late = [i for i, one in enumerate(results) if one.fault == "timeout" and self.no_clock]
        if late:
            raise RewardError(
                f"reward {self.name}, {_told(late[0], results, responses)}, and debug.deterministic=true lets no clock "
                "decide a score: raise reward.timeout, or set debug.deterministic=false"
            )
        wrong = [i for i, one in enumerate(results) if one.fault]
        if wrong and self.failure_score is None:
            raise RewardError(f"reward {self.name}, {_told(wrong[0], results, responses)}")
        return results

    def _abstains_rightly(self, one: Graded) -> Graded:
        if one.fault or one.score is not None or self.may_abstain:
            return one
        return Graded(None, "error", "returned None, not a finite number")

    def _tell_faults(self, results: Sequence[Graded], responses: Sequence[Response]) -> None:
        wrong = [i for i, one in enumerate(results) if one.fault]
        if not wrong:
            return
        first = _told(wrong[0], results, responses)
        if len(wrong) == len(results) and all(one.fault == "error" for one in results):
            raise RewardError(f"reward {self.name} failed on all {len(results)} samples; {first}")
        log.warning(
            "reward %s failed on %d of %d samples, which get %g; %s",
            self.name, len(wrong), len(results), self.failure_score, first,
        )  # fmt: skip
        self.faults.update(results[i].fault for i in wrong)

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """To call before the first step: raises ValueError naming the first row that cannot be graded."""
        for number, row in enumerate(rows):
            try:
                self.check_row(row)
            except Exception as error:  # scorers of other packages run here
                question = str(row.get("prompt", row.get("messages")))[:80]
                raise ValueError(f"reward {self.name}: row {number} ({question!r}) {error}") from error


def by_calls(run: Run, per: Part) -> Score:
    """A function of (prompts, completions, rows), all text, as a grader's score; `run` calls it with parts of a step.

    A fault is that of the whole part.
    """
    return lambda responses: list(itertools.chain(*run([call_of(part) for part in parts_of(responses, per)])))


def parts_of(responses: Sequence[Response], per: Part) -> list[list[Response]]:
    """What each call grades."""
    match per:
        case "sample":
            return [[one] for one in responses]
        case "group":
            return _grouped(responses)
        case "step":
            return [list(responses)]


def one_by_one(grade: Callable[[str, dict[str, Any]], float]) -> Score:
    """A grade of (completion, row) as a grader's score."""

    def score(responses: Sequence[Response]) -> list[Graded]:
        return [_one(grade, response) for response in responses]

    return score


def by_array(scores_of: Callable[[Sequence[Response]], np.ndarray]) -> Score:
    """A model's scores [N] as a grader's."""
    return lambda responses: [graded(score) for score in scores_of(responses)]


def _one(grade: Callable[[str, dict[str, Any]], float], response: Response) -> Graded:
    try:
        return graded(grade(response.text, response.prompt.row))
    except Exception as error:  # a sample's text may break a parser in any way
        return Graded(None, "error", f"raised {describe(error)}")


def call_of(responses: Sequence[Response]) -> Call:
    prompts = [response.prompt for response in responses]
    return Call([p.text for p in prompts], [r.text for r in responses], [p.row for p in prompts])


def _grouped(responses: Sequence[Response]) -> list[list[Response]]:
    """By prompt."""
    return [list(group) for _, group in itertools.groupby(responses, key=lambda response: id(response.prompt))]


def _told(i: int, results: Sequence[Graded], responses: Sequence[Response]) -> str:
    return f"sample {i} ({responses[i].text[:80]!r}): {results[i].why}"
