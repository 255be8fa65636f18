"""Policy losses that look at the ratio of a whole sequence; per token like those of `surrogates`.

Legend: B rows, T target tokens of a row, S sequences of a row; Δ = log π_θ − log π_old of a token.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_post.objectives.reductions import live, sequence_mean, sequence_sum, spread
from jaxrl_post.objectives.surrogates import MAX_LOG_RATIO, Surrogate, clipped_objective, constant, log_ratio, surrogate

Level = Literal["token", "sequence"]
MAX_LOG_MEAN_RATIO = 10.0


def _check_level(level: str) -> None:
    if level not in ("token", "sequence"):
        raise ValueError(f"level={level!r} is unknown; choose token or sequence")


def gspo(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    level: Level = "token",
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> Surrogate:
    """GSPO (arXiv:2507.18071): PPO clip on s = exp(mean_t Δ) of the sequence; use with seq-mean-token-mean.

    `level="sequence"` puts s itself on each token, its gradient shared by all tokens of the sequence; "token" is
    GSPO-token, sg(s)·π_θ/sg(π_θ), whose gradient stays on the token, so A may differ between tokens. With one A and one
    weight in a sequence both have the same value and gradient. log s is capped at 10 (verl).
    Raises ValueError on another level.
    """
    _check_level(level)
    delta_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    mean_BT = spread(sequence_mean(delta_BT, mask_BT, sequence_BT, num_sequences), mask_BT, sequence_BT)
    if level == "token":
        logp_BT = live(logp_BT, mask_BT)
        mean_BT = jax.lax.stop_gradient(mean_BT) + (logp_BT - jax.lax.stop_gradient(logp_BT))
    mean_BT = jnp.minimum(mean_BT, MAX_LOG_MEAN_RATIO)
    return clipped_objective(mean_BT, advantage_BT, mask_BT, clip_low, clip_high, None)


def gmpo(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> Surrogate:
    """GMPO (arXiv:2507.20673): −A·exp(mean_t clipped Δ), Δ bounded by the side its advantage pulls to.

    Bounds are in log space: Δ ≤ clip_high where A > 0, Δ ≥ −clip_low where A < 0. Each token carries its sequence's
    loss, with the sequence's mean advantage; use with seq-mean-token-mean.
    """
    delta_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    advantage_BT = constant(advantage_BT, mask_BT)
    high_BT = (advantage_BT > 0) & (delta_BT > clip_high)
    low_BT = (advantage_BT < 0) & (delta_BT < -clip_low)
    bounded_BT = jnp.where(high_BT, clip_high, jnp.where(low_BT, -clip_low, delta_BT))
    ratio_BS = jnp.exp(sequence_mean(bounded_BT, mask_BT, sequence_BT, num_sequences))
    advantage_BS = sequence_mean(advantage_BT, mask_BT, sequence_BT, num_sequences)
    return surrogate(
        spread(-advantage_BS * ratio_BS, mask_BT, sequence_BT),
        mask_BT,
        ratio=spread(ratio_BS, mask_BT, sequence_BT),
        kl_to_old=-delta_BT,
        clipped_high=high_BT,
        clipped_low=low_BT,
    )


def topr(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    level: Level = "sequence",
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> Surrogate:
    """TOPR (arXiv:2503.14286): −A·w·log π_θ, w = 1 where A ≥ 0, else the ratio truncated to [0, 1], a constant.

    `level` says whose ratio: the sequence's exp(Σ Δ) as in the paper, or each token's own.
    Raises ValueError on another level.
    """
    _check_level(level)
    delta_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    total_BT = delta_BT
    if level == "sequence":
        total_BT = spread(sequence_sum(delta_BT, mask_BT, sequence_BT, num_sequences), mask_BT, sequence_BT)
    ratio_BT = jax.lax.stop_gradient(jnp.exp(jnp.clip(total_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)))
    advantage_BT = constant(advantage_BT, mask_BT)
    weight_BT = jnp.where(advantage_BT < 0, jnp.minimum(ratio_BT, 1.0), 1.0)
    term_BT = -advantage_BT * weight_BT * live(logp_BT, mask_BT)
    return surrogate(term_BT, mask_BT, ratio=ratio_BT, kl_to_old=-delta_BT, weight=weight_BT)


def off_policy_keep(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    delta: float = 1e-4,
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> jax.Array:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556): 1 where a token's sequence stays in the loss.

    A token is dropped where A < 0 and its sequence's mean of log π_old − log π_θ exceeds `delta`. float32 [B, T], a
    constant, to be multiplied into a term.
    """
    delta_BT = jax.lax.stop_gradient(log_ratio(logp_BT, old_logp_BT, mask_BT))
    drift_BT = spread(sequence_mean(-delta_BT, mask_BT, sequence_BT, num_sequences), mask_BT, sequence_BT)
    return live((live(advantage_BT, mask_BT) >= 0) | (drift_BT <= delta), mask_BT)
