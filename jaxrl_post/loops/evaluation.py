"""How often a policy answers right: greedily, and within k tries, on the prompts of a task.

P prompts, n samples of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.loops.gather import grade, sample, sample_greedily
from jaxrl_post.loops.job import Job, build
from jaxrl_post.loops.measures import Metrics
from jaxrl_post.loops.network import rollout_params
from jaxrl_post.loops.policy import policy_params
from jaxrl_post.loops.run_folder import Which
from jaxrl_post.rollout.sampler import Rollout, Sampler
from jaxrl_post.types import Prompt


def evaluate(
    config: Config,
    weights: Path | None,
    train: bool = False,
    say: Callable[[str], None] = lambda line: None,
    which: Which = None,
) -> Metrics:
    """`val-core/TASK/acc/*`: mean@1 of a greedy answer, mean@n and best@k/mean of n = `rollout.samples_per_prompt`
    samples, for every power of two k ≤ n.

    Args:
      config: the task, reward and sampling; its algorithm is not looked at.
      weights: the run whose checkpoint, by `which`, is the policy; None is the recipe's own model.
      train: answer the training prompts (at most `evaluation.max_prompts`) instead of the held-out ones.
      say: told what is going on.

    Raises: ValueError for a run without checkpoint or of another shape, for a task without held-out prompts, and as
    `job.build`.
    """
    job = build(config)
    prompts = job.train_prompts[: config.evaluation.max_prompts] if train else job.held_out
    if not prompts:
        raise ValueError(
            f"data.task.kind={config.data.task.kind} has no held-out prompts: give data.task.held_out_path, or "
            "evaluate the training prompts"
        )
    network = job.network
    params, source = policy_params(network, config.seed, weights, which)
    sampler = Sampler(network.graphdef, network.model, network.mesh, job.stop_ids, job.token_bytes)
    params = rollout_params(network, params)
    say(f"{source}: {len(prompts)} {'training' if train else 'held-out'} prompts of {job.task_name}")
    greedy_P1 = _rewards(job, prompts, sample_greedily(job, sampler, params, prompts))
    say(f"greedy {greedy_P1.mean():.3f}; {config.rollout.samples_per_prompt} samples of each")
    sampled_Pn = _rewards(job, prompts, sample(job, sampler, params, prompts, step=0))
    name = f"val-core/{job.task_name}/acc"
    return {f"{name}/mean@1": float(greedy_P1.mean())} | {
        f"{name}/{key}": value for key, value in sampled_metrics(sampled_Pn).items()
    }


def sampled_metrics(rewards_Pn: np.ndarray) -> Metrics:
    """`mean@n`, and `best@k/mean` for every power of two k ≤ n (pass@k where rewards are 0 and 1)."""
    n = rewards_Pn.shape[1]
    tries = [1 << i for i in range(n.bit_length())]
    return {f"mean@{n}": float(rewards_Pn.mean())} | {
        f"best@{k}/mean": float(np.mean([best_of(rewards_n, k) for rewards_n in rewards_Pn])) for k in tries
    }


def best_of(rewards_n: np.ndarray, k: int) -> float:
    """The expected best of k of the n rewards, drawn without replacement.

    With rewards 0 and 1 this is the unbiased pass@k of Chen et al. (arXiv:2107.03374), 1 − C(n − c, k) / C(n, k).
    """
    n, left, expected = len(rewards_n), 1.0, 0.0
    for i, reward in enumerate(sorted(rewards_n.tolist(), reverse=True)):
        # The chance that the i-th best is among the k although no better one is.
        chosen = left * k / (n - i)
        expected += chosen * reward
        left -= chosen
        if i == n - k:
            break
    return expected


def _rewards(job: Job, prompts: Sequence[Prompt], rollout: Rollout) -> np.ndarray:
    """float64 [P, n]; a missing score is worth nothing."""
    _, scores = grade(job, prompts, rollout)
    return np.nan_to_num(scores.total_N).reshape(len(prompts), -1)
