"""What a critic's values make of rewards: advantages and value targets of a step's tokens, by GAE.

N samples of a step, R = rollout.max_new_tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.loops.measures import Metrics, mean_max_min
from jaxrl_post.objectives.returns import gae, token_rewards, whiten
from jaxrl_post.objectives.values import explained_variance
from jaxrl_post.types import Trajectory


class Scores(NamedTuple):
    """What the rewards and values of a step come to; `live_N` False has neither.

    `reward_N` float32; `penalty_NR` float32, coef · KL of each token; `value_NR` float32, of the state each token was
    sampled in; `after_N` float32, of the state after the last token, 0 where the response ended; `length_N` int32.
    """

    reward_N: Any
    penalty_NR: Any
    value_NR: Any
    after_N: Any
    length_N: Any
    live_N: Any


def credit_tokens(scores: Scores, *, gamma: float, lam: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whitened advantages and returns, float32 [N, R], and how much of the returns' variance the values explain."""
    R = scores.value_NR.shape[1]
    mask_NR = (jnp.arange(R)[None] < scores.length_N[:, None]) & scores.live_N[:, None]
    reward_NR = token_rewards(scores.reward_N[:, None], scores.penalty_NR, mask_NR, kl_coef=1.0)
    advantage_NR, return_NR = gae(
        reward_NR, scores.value_NR, mask_NR, gamma=gamma, lam=lam, bootstrap_BS=scores.after_N[:, None]
    )
    return whiten(advantage_NR, mask_NR), return_NR, explained_variance(scores.value_NR, return_NR, mask_NR)


def with_targets(t: Trajectory, advantage_R: np.ndarray, value_R: np.ndarray, return_R: np.ndarray) -> Trajectory:
    """With the columns of its own tokens."""
    n = len(t.response_ids)
    return dataclasses.replace(t, advantage=advantage_R[:n], value=value_R[:n], value_target=return_R[:n])


def as_targets(t: Trajectory) -> Trajectory:
    """As `training.critic` reads it: the target for an advantage, the value at sampling time for a log-prob."""
    if t.value is None or t.value_target is None:
        return dataclasses.replace(t, train=False)
    return dataclasses.replace(t, advantage=t.value_target, logp=t.value)


def value_metrics(trajectories: Sequence[Trajectory], explained: float) -> Metrics:
    """verl's, over live tokens; none without any."""
    values = [t.value for t in trajectories if t.value is not None and len(t.value)]
    targets = [t.value_target for t in trajectories if t.value_target is not None and len(t.value_target)]
    if not values:
        return {}
    named = {"critic/values": np.concatenate(values), "critic/returns": np.concatenate(targets)}
    metrics = {f"{name}/{kind}": x for name, tokens in named.items() for kind, x in mean_max_min(tokens).items()}
    return metrics | {"critic/vf_explained_var": explained}
