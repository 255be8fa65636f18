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

    term_BT: jax.Array
    stats: dict[str, jax.Array]


def log_ratio(logp_BT: jax.Array, old_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """log π_θ − log π_old in float32, clamped to ±20 (verl; no gradient beyond), 0 under the mask."""
    return jnp.clip(live(logp_BT, mask_BT) - constant(old_logp_BT, mask_BT), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def constant(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """`x` in float32 without gradient, 0 under the mask."""
    return jax.lax.stop_gradient(live(x_BT, mask_BT))


def surrogate(term_BT: jax.Array, mask_BT: jax.Array, **stats: jax.Array) -> Surrogate:
    """A Surrogate with everything under the mask set to 0 and gradients cut from the statistics."""
    return Surrogate(live(term_BT, mask_BT), {k: jax.lax.stop_gradient(live(v, mask_BT)) for k, v in stats.items()})


def clipped_objective(
    log_ratio_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Surrogate:
    """max(−A·r, −A·clip(r)) written as a choice of constants, so a token that is clipped has gradient exactly 0."""
    ratio_BT = jnp.exp(log_ratio_BT)
    advantage_BT = constant(advantage_BT, mask_BT)
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
    return clipped_objective(log_ratio_BT, advantage_BT, mask_BT, clip_low, clip_high, dual_clip)


def two_sided_clip(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float = 4.0,
) -> Surrogate:
    """PPO clip with the ratio also capped at `delta` where A < 0 (INTELLECT-2, arXiv:2505.07291; TRL's `delta`).

    The same function as dual clip with c = delta. Raises ValueError unless delta > 1 + clip_high.
    """
    if delta <= 1 + clip_high:
        raise ValueError(f"delta={delta} must be above 1 + clip_high = {1 + clip_high}; raise it or use ppo_clip")
    options = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": delta}
    return ppo_clip(logp_BT, old_logp_BT, advantage_BT, mask_BT, **options)


def policy_gradient(
    logp_BT: jax.Array, old_logp_BT: jax.Array, advantage_BT: jax.Array, mask_BT: jax.Array
) -> Surrogate:
    """REINFORCE: −A·log π_θ, without correction for samples of an older policy; gradient −A."""
    log_ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    term_BT = -constant(advantage_BT, mask_BT) * live(logp_BT, mask_BT)
    return surrogate(term_BT, mask_BT, ratio=jnp.exp(log_ratio_BT), kl_to_old=-log_ratio_BT)


def cispo(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Surrogate:
    """CISPO (arXiv:2506.13585): −sg(clip(r, 1−clip_low, 1+clip_high))·A·log π_θ; every token keeps a gradient.

    clip_low ≥ 1 leaves the lower side open. TRL's `epsilon_high` 5 is the bound itself, here clip_high 4.
    """
    log_ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    ratio_BT = jax.lax.stop_gradient(jnp.exp(log_ratio_BT))
    high_BT, low_BT = ratio_BT > 1.0 + clip_high, ratio_BT < 1.0 - clip_low
    weight_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    term_BT = -weight_BT * constant(advantage_BT, mask_BT) * live(logp_BT, mask_BT)
    return surrogate(
        term_BT, mask_BT, ratio=ratio_BT, kl_to_old=-log_ratio_BT, clipped_high=high_BT, clipped_low=low_BT
    )


def sapo(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Surrogate:
    """SAPO (arXiv:2511.20347): −A·(4/τ)·σ(τ(r − 1)), τ by the sign of A; a soft gate instead of a clip.

    At r = 1 the gradient is the policy gradient −A.
    """
    log_ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    ratio_BT = jnp.exp(log_ratio_BT)
    advantage_BT = constant(advantage_BT, mask_BT)
    tau_BT = jnp.where(advantage_BT > 0, tau_positive, tau_negative)
    gate_BT = 4.0 / tau_BT * jax.nn.sigmoid(tau_BT * (ratio_BT - 1.0))
    return surrogate(-advantage_BT * gate_BT, mask_BT, ratio=ratio_BT, kl_to_old=-log_ratio_BT, gate=gate_BT)


def _dppo(
    logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    log_ratio_BT: jax.Array,
    high_BT: jax.Array,
    low_BT: jax.Array,
    max_ratio: float,
) -> Surrogate:
    """−A·sg(min(r, max_ratio))·log π_θ, without the tokens that already left the trust region by their own pull."""
    ratio_BT = jax.lax.stop_gradient(jnp.exp(log_ratio_BT))
    advantage_BT = constant(advantage_BT, mask_BT)
    high_BT, low_BT = high_BT & (advantage_BT > 0), low_BT & (advantage_BT < 0)
    term_BT = -advantage_BT * jnp.minimum(ratio_BT, max_ratio) * live(logp_BT, mask_BT)
    term_BT = jnp.where(high_BT | low_BT, 0.0, term_BT)
    return surrogate(
        term_BT, mask_BT, ratio=ratio_BT, kl_to_old=-log_ratio_BT, clipped_high=high_BT, clipped_low=low_BT
    )


def dppo_tv(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    max_ratio: float = 20.0,
) -> Surrogate:
    """DPPO with total variation (arXiv:2602.04879): −A·sg(min(r, max_ratio))·log π_θ while inside the trust region.

    A token is dropped (term and gradient 0) when its probability has moved beyond the region in the direction its
    advantage pulls: A > 0 and p − p_old > delta_high, or A < 0 and p − p_old < −delta_low.
    """
    log_ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    moved_BT = jnp.exp(live(logp_BT, mask_BT)) - jnp.exp(live(old_logp_BT, mask_BT))
    high_BT, low_BT = moved_BT > delta_high, moved_BT < -delta_low
    return _dppo(logp_BT, advantage_BT, mask_BT, log_ratio_BT, high_BT, low_BT, max_ratio)


def dppo_kl(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    delta: float = 0.05,
    max_ratio: float = 20.0,
) -> Surrogate:
    """DPPO with binary KL (arXiv:2602.04879): `dppo_tv` with the region KL((p_old, 1−p_old) ‖ (p, 1−p)) ≤ delta."""
    log_ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    p_BT, old_p_BT = jnp.exp(live(logp_BT, mask_BT)), jnp.exp(live(old_logp_BT, mask_BT))
    rest_BT, old_rest_BT = jnp.maximum(1.0 - p_BT, 1e-7), jnp.maximum(1.0 - old_p_BT, 1e-7)
    far_BT = -old_p_BT * log_ratio_BT + old_rest_BT * (jnp.log(old_rest_BT) - jnp.log(rest_BT)) > delta
    high_BT, low_BT = far_BT & (log_ratio_BT > 0), far_BT & (log_ratio_BT < 0)
    return _dppo(logp_BT, advantage_BT, mask_BT, log_ratio_BT, high_BT, low_BT, max_ratio)


def dro(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    beta: float = 0.1,
) -> Surrogate:
    """DRO (verl's form): −(A·log π_θ − ½·β·(log r)²); a quadratic pull to π_old in place of clipping."""
    log_ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    gain_BT = constant(advantage_BT, mask_BT) * live(logp_BT, mask_BT)
    term_BT = beta / 2 * jnp.square(log_ratio_BT) - gain_BT
    return surrogate(term_BT, mask_BT, ratio=jnp.exp(log_ratio_BT), kl_to_old=-log_ratio_BT)
