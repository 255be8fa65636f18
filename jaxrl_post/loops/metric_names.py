"""What can be said of the names of a run's metrics before it has made a step."""

from __future__ import annotations

import difflib
from typing import NamedTuple

import numpy as np

from jaxrl_post.config_ppo import PPO
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.measures import part_metrics, sample_metrics
from jaxrl_post.rollout.sampler import Rollout
from jaxrl_post.types import Completion, Prompt, StopReason

EVALUATED = "val-"  # begins the names of metrics that only steps with an evaluation have
LATE = ("timing_s", "compile", "alert", "reward")  # beginnings of those that a step has after its save alone
OPEN = ("actor", "training", "rollout_corr", "distillation", "fully_async", "global_seqlen")


class Names(NamedTuple):
    """`known` in full. Of names that begin with one of `groups`, with any where that is None, only the run can tell."""

    known: frozenset[str] = frozenset()
    groups: frozenset[str] | None = None

    def may_have(self, name: str) -> bool:
        """Whether a step may have such a metric when it is decided whether to save it."""
        group = name.partition("/")[0]
        return name in self.known or (group not in LATE and (self.groups is None or group in self.groups))

    def near(self, name: str) -> str:
        """Those like it, and how others begin."""
        others = sorted(f"{group}/…" for group in self.groups or ())
        return ", ".join([*(nearest(name, self.known) or sorted(self.known)[:8]), *others])


def nearest(name: str, names: frozenset[str] | dict[str, float]) -> list[str]:
    return difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.4)


def online_names(job: Job, evaluates: bool) -> Names:
    """Of a run that samples."""
    heads_1K = np.zeros((1, len(job.reward.names)))
    one = Completion(0, np.zeros(1, np.int32), np.zeros(1), np.zeros(1), StopReason.STOP)
    sampled = sample_metrics([Prompt((0,), "", {})], Rollout([one], (1,), (1,)), np.zeros(1), np.zeros(1), 1)
    known = {*sampled, *part_metrics(job.reward.names, heads_1K), "training/global_step"}
    if evaluates:
        known |= evaluation_names(job)
    return Names(frozenset(known), frozenset(OPEN) | ({"critic"} if isinstance(job.config.algorithm, PPO) else set()))


def evaluation_names(job: Job) -> set[str]:
    """Of `loops.online.evaluate`."""
    heads_1K = np.zeros((1, len(job.reward.names)))
    parts = part_metrics(job.reward.names, heads_1K, f"{EVALUATED}aux/{job.task_name}")
    means = {f"{name}@1" for name in parts if name.endswith("/mean")}
    return {f"{EVALUATED}core/{job.task_name}/acc/mean@1"} | means
