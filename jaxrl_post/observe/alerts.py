"""Raises the alarm when a number of a step is unlike those before it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping

from jaxrl_post.config_alerts import Alerts as Options

ALL_FAILED = "reward/all_failed"
LEAST_CHANGE = 0.01  # of the usual magnitude: what is still is not alarmed by a tremor


class FailedRewardsError(ValueError):
    """Steps have nothing to learn from, as rewards fail."""


class Alerts:
    """Looks at one step after the other; remembers the last ones."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._seen = {name: deque[float](maxlen=options.window + 1) for name in options.jumps}
        self._failed_in_a_row = 0

    def look(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """What is wrong with this step's metrics, by name; those it lacks are passed over."""
        names = [name for name in (*self._options.jumps, *self._options.limits) if name in metrics]
        reasons = {name: self._reason(name, float(metrics[name])) for name in names}
        for name in self._seen.keys() & metrics.keys():
            if math.isfinite(metrics[name]):
                self._seen[name].append(float(metrics[name]))
        self._failed_in_a_row = self._failed_in_a_row + 1 if metrics.get(ALL_FAILED) else 0
        reasons[ALL_FAILED] = _failed(metrics) if self._failed_in_a_row else ""
        return {name: reason for name, reason in reasons.items() if reason}

    def check(self) -> None:
        """Raises: FailedRewardsError when as many steps in a row as the options allow have come to nothing."""
        limit = self._options.failed_reward_steps
        if limit is not None and self._failed_in_a_row >= limit:
            raise FailedRewardsError(
                f"alerts.failed_reward_steps={limit}: a reward failed on all samples of so many steps in a row. The "
                "warnings say how: see to what it needs, or raise reward.timeout; the same command goes on from the "
                "last checkpoint, where there is one"
            )

    def _reason(self, name: str, value: float) -> str:
        if not math.isfinite(value):
            return f"{name} is {value}"
        limit = self._options.limits.get(name)
        if limit is not None and abs(value) > limit:
            return f"{name} is {value:.4g}, beyond alerts.limits of {limit:g}"
        return self._jump(name, value) if name in self._seen else ""

    def _jump(self, name: str, value: float) -> str:
        before = list(self._seen[name])
        if len(before) <= max(self._options.window // 2, 1):
            return ""
        changes = [abs(b - a) for a, b in itertools.pairwise(before)]
        usual = max(statistics.median(changes), LEAST_CHANGE * statistics.median(map(abs, before)))
        change = abs(value - before[-1])
        if usual == 0 or change <= self._options.jumps[name] * usual:
            return ""
        return f"{name} went from {before[-1]:.4g} to {value:.4g}, {change / usual:.0f} times its usual change"


def _failed(metrics: Mapping[str, float]) -> str:
    counts = {name: metrics.get(f"reward/{name}", 0.0) for name in ("failed", "timeouts", "crashes")}
    told = ", ".join(f"{count:.0f} {name}" for name, count in counts.items())
    return f"a reward failed on all of its samples ({told})"


def as_metrics(reasons: Mapping[str, str]) -> dict[str, float]:
    return {f"alert/{name}": 1.0 for name in reasons}
