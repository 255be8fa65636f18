"""When a run saves, by steps, by the clock and by a metric, and which step was its best."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_post.config_checkpoint import Checkpoint, KeepBest
from jaxrl_post.loops.metric_names import EVALUATED, Names, nearest
from jaxrl_post.loops.run_folder import due
from sharding.processes import from_first, is_first

log = logging.getLogger(__name__)


class Saves:
    """Decides after each step. The record of the best step is part of a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        steps: int,
        evaluates: bool,
        names: Names = Names(),  # noqa: B008 (immutable)
        clock: Callable[[], float] = time.monotonic,
    ):
        """Raises: ValueError where the best is to be told by a metric that the run cannot have: one of evaluations when
        it makes none, or one that is not among its `names`."""
        best = checkpoint.keep_best
        if best and best.metric.startswith(EVALUATED) and not evaluates:
            raise ValueError(
                f"checkpoint.keep_best.metric={best.metric} comes from evaluations and the run makes none: set "
                "evaluation.enabled=true and give held-out data, or name a metric of training"
            )
        if best and not names.may_have(best.metric):
            raise ValueError(
                f"checkpoint.keep_best.metric={best.metric}: no such metric in this run when a step is saved; name one "
                f"of {names.near(best.metric)}"
            )
        self._checkpoint, self._steps, self._clock, self._warned = checkpoint, steps, clock, False
        self._began = self._ended = self._saved = clock()
        self._seen, self._longest = 0, 0.0
        self._best: dict[str, Any] | None = None

    @property
    def best_step(self) -> int | None:
        return self._best["step"] if self._best else None

    def state(self) -> dict[str, Any]:
        """The record of the best step, for JSON."""
        return {"best": self._best}

    def restore(self, host: Mapping[str, Any]) -> None:
        """Take up the record of a checkpoint, unless that was of another metric."""
        found, best = host.get("best"), self._checkpoint.keep_best
        if found and best and (found["metric"], found["mode"]) == (best.metric, best.mode):
            self._best = dict(found)

    def out_of_time(self) -> bool:
        """Whether `before` is too near for another step; to ask once a step, at its end."""
        now = self._clock()
        took, self._ended = now - self._ended, now
        # The first step also loads and compiles: the second replaces it.
        self._longest = took if self._seen < 2 else max(self._longest, took)
        self._seen += 1
        limit = self._checkpoint.limit_seconds
        return limit is not None and now - self._began + 2 * self._longest > limit

    def due(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether this step is to be saved; notes a new best. The same on all processes.

        The first step that lacks the metric to keep the best of, and should have it, is told in a warning.
        """
        best = self._improves(step, metrics)  # first: it keeps the record
        return best or due(step, self._checkpoint.every, self._steps) or self._minutes_passed()

    def saved(self) -> None:
        """A save begins: `every_minutes` counts from here."""
        self._saved = self._clock()

    def _minutes_passed(self) -> bool:
        minutes = self._checkpoint.every_minutes
        return minutes is not None and from_first(lambda: self._clock() - self._saved >= minutes * 60)

    def _improves(self, step: int, metrics: Mapping[str, float]) -> bool:
        wanted = self._checkpoint.keep_best
        if wanted is None:
            return False
        if wanted.metric not in metrics:
            self._warn(wanted.metric, metrics)
            return False
        value = float(metrics[wanted.metric])
        if not math.isfinite(value) or (self._best and not _better(wanted, value, self._best["value"])):
            return False
        self._best = {"step": step, "value": value, "metric": wanted.metric, "mode": wanted.mode}
        return True

    def _warn(self, name: str, metrics: Mapping[str, float]) -> None:
        if self._warned or not _lacks(name, metrics):
            return
        self._warned = True
        if is_first():
            near = ", ".join(nearest(name, dict(metrics)) or sorted(metrics)[:8])
            log.warning(
                "checkpoint.keep_best.metric=%s: this step has no such metric, and while none has it no best step is "
                "kept; nearest %s (metrics.jsonl lists all)",
                name, near,
            )  # fmt: skip


def _lacks(name: str, metrics: Mapping[str, float]) -> bool:
    """Whether a step without the metric should have it: of evaluations not all steps have any."""
    return not name.startswith(EVALUATED) or any(other.startswith(EVALUATED) for other in metrics)


def _better(wanted: KeepBest, value: float, record: float) -> bool:
    return value > record if wanted.mode == "max" else value < record
