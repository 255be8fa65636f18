"""One call of a grader's code, and what comes of it. Imported by the workers too, so it costs no accelerator stack.

Legend: n samples of a call.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrl_post.rewards.function import describe

Fault = Literal["", "error", "timeout", "crash"]


class RewardError(ValueError):
    """A grader failed or returned something other than one finite number for each completion."""


class Call(NamedTuple):
    """The aligned arguments of a reward function, [n] each."""

    prompts: list[str]
    completions: list[str]
    rows: list[dict[str, Any]]


class Graded(NamedTuple):
    """What came of one sample: a finite score, None where the grader has nothing to say, or a fault and its reason."""

    score: float | None
    fault: Fault = ""
    why: str = ""


Run = Callable[[Sequence[Call]], list[list[Graded]]]  # one [n] for each call


def failed(call: Call, fault: Fault, why: str) -> list[Graded]:
    """[n], all of a call that gave nothing."""
    return [Graded(None, fault, why)] * len(call.completions)


def answer(function: Callable[..., Any], call: Call) -> list[Graded]:
    """[n]: the function's scores, checked. Whatever it raises or returns, nothing is raised here."""
    count = len(call.completions)
    try:
        returned = function(*call)
        scores = list(returned) if isinstance(returned, Iterable) else None
    except (Exception, SystemExit) as error:  # the function may be anyone's code
        return failed(call, "error", f"raised {describe(error)}")
    if scores is None:
        wanted = f"{count} number{'s' * (count > 1)}, one for each completion"
        return failed(call, "error", f"returned {_shown(returned)}, not a list of {wanted}")
    if len(scores) != count:
        return failed(call, "error", f"returned {len(scores)} scores for {count} completion{'s' * (count > 1)}")
    return [graded(score) for score in scores]


def graded(score: Any) -> Graded:
    if score is None:
        return Graded(None)
    try:
        number = float(score) if isinstance(score, numbers.Real | np.bool_) else math.nan
    except (OverflowError, ValueError, TypeError):  # an integer beyond all floats, say
        number = math.nan
    return (
        Graded(number)
        if math.isfinite(number)
        else Graded(None, "error", f"returned {_shown(score)}, not a finite number")
    )


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # it may be an object of anyone's, or an integer too long to be written
        return f"something of type {type(value).__name__}"
