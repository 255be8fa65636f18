"""Policy losses per token, to be minimised.

Each is `f(logp_BT, old_logp_BT, advantage_BT, mask_BT, *, options) -> Surrogate`; those that look at whole sequences
also take `sequence_BT, num_sequences`. `old_logp` and `advantage` are constants: no gradient flows into them. Masked
entries may hold anything; their terms, statistics and gradients are 0.

Legend: B rows, T target tokens of a row; r = π_θ/π_old of a token, A its advantage.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.objectives.reductions import live

MAX_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    """`term_BT` float32, the loss of each token before weighting; `stats` float32 [B, T] arrays without gradient."""

    term_BT: jax.Array  # noqa: N815 (capitals are logical dimensions)
    stats: dict[str, jax.Array]


def log_ratio(logp_BT: jax.Array, old_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """log π_θ − log π_old in float32, clamped to ±20 (verl; no gradient beyond), 0 under the mask."""
    difference_BT = live(logp_BT, mask_BT) - jax.lax.stop_gradient(live(old_logp_BT, mask_BT))
    return jnp.clip(difference_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def surrogate(term_BT: jax.Array, mask_BT: jax.Array, **stats: jax.Array) -> Surrogate:
    """A Surrogate with everything under the mask set to 0 and gradients cut from the statistics."""
    return Surrogate(live(term_BT, mask_BT), {k: jax.lax.stop_gradient(live(v, mask_BT)) for k, v in stats.items()})


def _clipped_objective(
    log_ratio_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Surrogate:
    """max(−A·r, −A·clip(r)) written as a choice of constants, so a token that is clipped has gradient exactly 0."""
    ratio_BT = jnp.exp(log_ratio_BT)
    advantage_BT = jax.lax.stop_gradient(live(advantage_BT, mask_BT))
    high_BT = (advantage_BT > 0) & (ratio_BT > 1.0 + clip_high)
    low_BT = (advantage_BT < 0) & (ratio_BT < 1.0 - clip_low)
    used_BT = jnp.where(high_BT, 1.0 + clip_high, jnp.where(low_BT, 1.0 - clip_low, ratio_BT))
    dual_BT = jnp.zeros_like(high_BT)
    if dual_clip is not None:
        dual_BT = (advantage_BT < 0) & (ratio_BT > dual_clip)
        used_BT = jnp.where(dual_BT, dual_clip, used_BT)
    return surrogate(
        -advantage_BT * used_BT,
        mask_BT,
        ratio=ratio_BT,
        kl_to_old=-log_ratio_BT,
        clipped_high=high_BT,
        clipped_low=low_BT,
        clipped_dual=dual_BT,
    )


def ppo_clip(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO (arXiv:1707.06347): max(−A·r, −A·clip(r, 1−clip_low, 1+clip_high)); DAPO's clip-higher is 0.2/0.28.

    `dual_clip` c (arXiv:1912.09729; None is off) bounds the loss of tokens with A < 0 by −A·c.
    Statistics: `ratio`, `kl_to_old` (log π_old − log π_θ; its mean is verl's ppo_kl), and `clipped_high`,
    `clipped_low`, `clipped_dual`, 1 where that bound replaced the ratio.
    Raises ValueError when `dual_clip` is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be above 1 (3 is usual), or None to switch it off")
    log_ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    return _clipped_objective(log_ratio_BT, advantage_BT, mask_BT, clip_low, clip_high, dual_clip)
