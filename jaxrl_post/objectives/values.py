"""The critic's loss and how well it explains the returns.

Legend: B rows, T target tokens of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_post.objectives.reductions import live, masked_mean
from jaxrl_post.objectives.surrogates import Surrogate, surrogate


def value_loss(
    value_BT: jax.Array,
    old_value_BT: jax.Array,
    return_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip: float | None = 0.5,
) -> Surrogate:
    """½·max((v − R)², (clip(v, v_old ± clip) − R)²) per token (arXiv:1707.06347); `clip=None` is ½·(v − R)².

    `old_value` is the value recorded at rollout time, not re-predicted; it and `return` are constants. Where the
    clipped branch wins the gradient is 0, and `stats["clipped"]` 1. Usual clips: verl and OpenRLHF 0.5, slime and
    SkyRL 0.2.
    """
    value_BT = live(value_BT, mask_BT)
    old_value_BT, return_BT = jax.lax.stop_gradient((live(old_value_BT, mask_BT), live(return_BT, mask_BT)))
    error_BT = value_BT - return_BT
    if clip is None:
        return surrogate(jnp.square(error_BT) / 2, mask_BT, clipped=jnp.zeros_like(mask_BT))
    near_BT = jax.lax.stop_gradient(jnp.clip(value_BT, old_value_BT - clip, old_value_BT + clip))
    clipped_BT = jnp.abs(near_BT - return_BT) > jnp.abs(error_BT)
    term_BT = jnp.square(jnp.where(clipped_BT, near_BT - return_BT, error_BT)) / 2
    return surrogate(term_BT, mask_BT, clipped=clipped_BT)


def explained_variance(value_BT: jax.Array, return_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """1 − Var(R − V)/Var(R) over live tokens, a scalar; 0 when the returns do not vary."""

    def variance(x_BT: jax.Array) -> jax.Array:
        x_BT = live(x_BT, mask_BT)
        return masked_mean(jnp.square(x_BT - masked_mean(x_BT, mask_BT)), mask_BT)

    total, residual = variance(return_BT), variance(live(return_BT, mask_BT) - live(value_BT, mask_BT))
    return jnp.where(total > 0, 1.0 - residual / jnp.where(total > 0, total, 1.0), 0.0)
