"""Estimators of KL(π_θ ‖ π_ref) from the sampled token, as loss terms or inside the reward.

With Δ = log π_θ − log π_ref clamped to ±20 (no gradient beyond):

    name   value               gradient by log π_θ    expectation of that gradient on policy
    k1     Δ                   1                      0: no pull at all when used as a loss
    k2     Δ²/2                Δ                      ∇KL(π_θ ‖ π_ref), the wanted one
    k3     e^−Δ + Δ − 1        1 − e^−Δ               ∇KL(π_ref ‖ π_θ), the other direction
    abs    |Δ|                 sign Δ                 pull of constant size

A `+` after a name keeps its value and takes k2's gradient (straight-through, verl). `importance_corrected` multiplies
by π_θ/π_old, whose gradient is the wanted one for k1 and k3, and stays so off policy.

Legend: B rows, T target tokens of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_post.objectives.reductions import live
from jaxrl_post.objectives.surrogates import log_ratio

MAX_K3 = 10.0
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")


def _plain(delta_BT: jax.Array, estimator: str) -> jax.Array:
    if estimator == "k1":
        return delta_BT
    if estimator == "k2":
        return jnp.square(delta_BT) / 2
    if estimator == "abs":
        return jnp.abs(delta_BT)
    return jnp.minimum(jnp.expm1(-delta_BT) + delta_BT, MAX_K3)


def penalty(logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array, estimator: str) -> jax.Array:
    """KL estimate of each token, float32 [B, T], 0 under the mask; k3 is capped at 10 (no gradient above).

    `estimator` is one of k1, k2, k3 (Schulman's names), abs, or any of them with a `+`; the module's table gives value
    and gradient. `ref_logp` is a constant. Raises ValueError on another name.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator={estimator!r} is unknown; choose one of {', '.join(ESTIMATORS)}")
    delta_BT = log_ratio(logp_BT, ref_logp_BT, mask_BT)
    value_BT = _plain(delta_BT, estimator.removesuffix("+"))
    if estimator.endswith("+"):
        k2_BT = _plain(delta_BT, "k2")
        value_BT = jax.lax.stop_gradient(value_BT) + (k2_BT - jax.lax.stop_gradient(k2_BT))
    return live(value_BT, mask_BT)


def importance_corrected(
    logp_BT: jax.Array, old_logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array, estimator: str
) -> jax.Array:
    """penalty · π_θ/π_old with gradient through both factors, float32 [B, T] (DeepSeek-V3.2, arXiv:2512.02556).

    Unbiased for samples of π_old in value and, with k1 or k3, in gradient. Raises ValueError like `penalty`.
    """
    ratio_BT = jnp.exp(log_ratio(logp_BT, old_logp_BT, mask_BT))
    return live(ratio_BT * penalty(logp_BT, ref_logp_BT, mask_BT, estimator), mask_BT)


def adapted_coefficient(
    coef: jax.Array | float, observed_kl: jax.Array | float, *, target: float, samples: int, horizon: int
) -> jax.Array | float:
    """The next KL coefficient of the adaptive controller (arXiv:1909.08593): coef·(1 + clip(KL/target − 1, ±0.2)·n/h).

    `samples` n are those seen since the last call, `horizon` h in samples too. Raises ValueError unless `target` and
    `horizon` are positive.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target={target} and horizon={horizon} must both be positive")
    return coef * (1 + jnp.clip(observed_kl / target - 1, -0.2, 0.2) * samples / horizon)
