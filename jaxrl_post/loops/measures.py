"""Metrics of a step's samples, under verl's names. N samples in groups of G."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.rollout.sampler import Rollout
from jaxrl_post.types import Prompt, StopReason
from sharding.processes import fetch

Metrics = dict[str, float]


def sample_metrics(
    prompts: Sequence[Prompt], rollout: Rollout, rewards_N: np.ndarray, advantages_N: np.ndarray, width: int
) -> Metrics:
    """Rewards, advantages and lengths. `clip_ratio` is the share cut by the limit, `width` the room for prompts."""
    lengths_N = np.array([len(c.ids) for c in rollout.completions])
    cut_N = np.array([c.stop is StopReason.LENGTH for c in rollout.completions])
    prompt_P = np.array([len(p.ids) for p in prompts])
    rewards_PG = rewards_N.reshape(len(prompts), -1)
    spread = {"critic/score": rewards_N, "critic/rewards": rewards_N, "critic/advantages": advantages_N}
    spread |= {"response_length": lengths_N, "prompt_length": prompt_P}
    metrics = {f"{name}/{kind}": value for name, x in spread.items() for kind, value in mean_max_min(x).items()}
    return metrics | {
        "response_length/clip_ratio": float(cut_N.mean()),
        "prompt_length/clip_ratio": float((prompt_P >= width).mean()),
        "frac_reward_zero_std": float((rewards_PG.min(axis=1) == rewards_PG.max(axis=1)).mean()),
        "rollout/decode_steps": float(max(rollout.decode_steps)),
        "rollout/refills": float(max(rollout.refills)),
        "perf/total_num_tokens": float(lengths_N.sum() + (prompt_P * rewards_PG.shape[1]).sum()),
    }


def part_metrics(names: Sequence[str], heads_NK: np.ndarray, prefix: str = "critic/score") -> Metrics:
    """What each part of a weighted reward says of a step, where it says something; a reward of one part has none."""
    parts = {name: head[~np.isnan(head)] for name, head in zip(names, heads_NK.T, strict=True)}
    spread = {name: mean_max_min(x) for name, x in parts.items() if len(x) and len(names) > 1}
    return {f"{prefix}/{name}/{kind}": value for name, found in spread.items() for kind, value in found.items()}


def speed_metrics(tokens: float, seconds: float, devices: int) -> Metrics:
    """`perf/throughput` is prompt and response tokens per second and device over the whole step, as in verl."""
    peak_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / devices,
        "perf/cpu_memory_used_gb": peak_kilobytes / 2**20,
    }


def mean_max_min(x: np.ndarray) -> Metrics:
    return {"mean": float(x.mean()), "max": float(x.max()), "min": float(x.min())}


def floats(metrics: Mapping[str, Any]) -> Metrics:
    """Scalars on the devices as numbers here."""
    return {name: float(value) for name, value in fetch(metrics).items()}


def mean_metrics(rows: Sequence[Metrics]) -> Metrics:
    """Of rows that have the same names; none of none."""
    return {name: float(np.mean([row[name] for row in rows])) for name in (rows[0] if rows else {})}
