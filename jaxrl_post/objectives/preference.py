"""Losses from preferences: pairs (chosen, rejected), unpaired labels, and reward models.

A log-prob here is that of a whole answer, summed over its tokens (or their mean, where said). Losses are per pair; a
pair under the mask, such as one whose answer lost all its tokens to truncation, adds 0 and may hold anything.

Legend: N pairs (or answers). σ the logistic function; c, r the implicit rewards β·(log π_θ − log π_ref) of chosen and
rejected, h = (c − r)/β.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.objectives.reductions import live, masked_mean


class Pair(NamedTuple):
    """Answer log-probs [N] under the policy and the reference; the reference ones are constants."""

    chosen: jax.Array
    rejected: jax.Array
    ref_chosen: jax.Array
    ref_rejected: jax.Array


def log_ratios(pair: Pair, mask_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log π_θ − log π_ref of chosen and rejected, float32 [N] each, 0 under the mask."""
    chosen_N, rejected_N, ref_chosen_N, ref_rejected_N = (live(x, mask_N) for x in pair)
    return chosen_N - jax.lax.stop_gradient(ref_chosen_N), rejected_N - jax.lax.stop_gradient(ref_rejected_N)


def reward_stats(pair: Pair, mask_N: jax.Array, *, beta: float) -> dict[str, jax.Array]:
    """Implicit rewards as constants [N]: chosen, rejected, margin, and accuracy (1 where chosen wins)."""
    c_N, r_N = (jax.lax.stop_gradient(beta * x) for x in log_ratios(pair, mask_N))
    return {"chosen": c_N, "rejected": r_N, "margin": c_N - r_N, "accuracy": live(c_N > r_N, mask_N)}


def divergence_scores(
    pair: Pair, mask_N: jax.Array, *, divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"], alpha: float = 0.5
) -> Pair:
    """f-DPO (arXiv:2309.16240): f′(π_θ/π_ref) of each answer in place of its log-ratio u, against references of 0.

    f′ up to constants: u (reverse KL, plain DPO), −e^−u (forward KL), log σ(u) (Jensen–Shannon), e^((α−1)u)/(α−1)
    (alpha, exponent at most 80; reverse KL at α = 1). Raises ValueError for another `divergence`.
    """
    power = {"reverse_kl": 0.0, "forward_kl": -1.0, "js": 0.0, "alpha": alpha - 1.0}
    if divergence not in power:
        raise ValueError(f"divergence={divergence!r} must be one of {', '.join(power)}")
    p = power[divergence]

    def score(u_N: jax.Array) -> jax.Array:
        if divergence == "js":
            return jax.nn.log_sigmoid(u_N)
        return u_N if abs(p) < 1e-6 else jnp.exp(jnp.minimum(p * u_N, 80.0)) / p

    chosen_N, rejected_N = log_ratios(pair, mask_N)
    return Pair(score(chosen_N), score(rejected_N), jnp.zeros_like(chosen_N), jnp.zeros_like(rejected_N))


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 0.5): it is the share of flipped labels")


def _logit(pair: Pair, mask_N: jax.Array, beta: float) -> jax.Array:
    chosen_N, rejected_N = log_ratios(pair, mask_N)
    return beta * (chosen_N - rejected_N)


def dpo(pair: Pair, mask_N: jax.Array, *, beta: float = 0.1, label_smoothing: float = 0.0) -> jax.Array:
    """DPO (arXiv:2305.18290) −(1−s)·log σ(βh) − s·log σ(−βh); s > 0 is conservative DPO.

    ln 2 where the policy equals the reference. Raises ValueError unless 0 ≤ s < 0.5.
    """
    _check_smoothing(label_smoothing)
    logit_N = _logit(pair, mask_N, beta)
    win_N, lose_N = jax.nn.log_sigmoid(logit_N), jax.nn.log_sigmoid(-logit_N)
    return live(-(1 - label_smoothing) * win_N - label_smoothing * lose_N, mask_N)


def robust_dpo(pair: Pair, mask_N: jax.Array, *, beta: float = 0.1, label_smoothing: float = 0.1) -> jax.Array:
    """Robust DPO (arXiv:2403.00409): (−(1−s)·log σ(βh) + s·log σ(−βh))/(1 − 2s), unbiased under flip rate s.

    Raises ValueError unless 0 ≤ s < 0.5.
    """
    _check_smoothing(label_smoothing)
    logit_N = _logit(pair, mask_N, beta)
    win_N, lose_N = jax.nn.log_sigmoid(logit_N), jax.nn.log_sigmoid(-logit_N)
    return live((label_smoothing * lose_N - (1 - label_smoothing) * win_N) / (1 - 2 * label_smoothing), mask_N)


def hinge(pair: Pair, mask_N: jax.Array, *, beta: float = 0.1) -> jax.Array:
    """max(0, 1 − βh) (RSO, arXiv:2309.06657; SLiC)."""
    return live(jax.nn.relu(1 - _logit(pair, mask_N, beta)), mask_N)


def ipo(
    pair: Pair,
    mask_N: jax.Array,
    *,
    beta: float = 0.1,
    chosen_length_N: jax.Array | None = None,
    rejected_length_N: jax.Array | None = None,
) -> jax.Array:
    """IPO (arXiv:2310.12036): (h − 1/(2β))². With lengths each log-ratio is divided by its answer's tokens (TRL).

    Raises ValueError when only one of the lengths is given.
    """
    if (chosen_length_N is None) != (rejected_length_N is None):
        raise ValueError("give both chosen_length_N and rejected_length_N, or neither")
    chosen_N, rejected_N = log_ratios(pair, mask_N)
    if chosen_length_N is not None and rejected_length_N is not None:
        chosen_N = chosen_N / jnp.maximum(live(chosen_length_N, mask_N), 1.0)
        rejected_N = rejected_N / jnp.maximum(live(rejected_length_N, mask_N), 1.0)
    return live(jnp.square(chosen_N - rejected_N - 1 / (2 * beta)), mask_N)


def exo(pair: Pair, mask_N: jax.Array, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> jax.Array:
    """EXO for pairs (arXiv:2402.00856): KL((σ(βh), σ(−βh)) ‖ (1 − s, s)).

    Raises ValueError unless 0 < s < 0.5: at s = 0 the target has no mass to divide by.
    """
    if not 0 < label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in (0, 0.5); 1e-3 is usual")
    logit_N = _logit(pair, mask_N, beta)
    win_N, lose_N = jax.nn.log_sigmoid(logit_N), jax.nn.log_sigmoid(-logit_N)
    win_gap_N = win_N - jnp.log1p(-label_smoothing)
    lose_gap_N = lose_N - jnp.log(label_smoothing)
    return live(jnp.exp(win_N) * win_gap_N + jnp.exp(lose_N) * lose_gap_N, mask_N)


def nca(pair: Pair, mask_N: jax.Array, *, beta: float = 0.1) -> jax.Array:
    """NCA for pairs (arXiv:2402.05369): −log σ(c) − ½·log σ(−c) − ½·log σ(−r)."""
    c_N, r_N = (beta * x for x in log_ratios(pair, mask_N))
    log_sigmoid = jax.nn.log_sigmoid
    return live(-log_sigmoid(c_N) - log_sigmoid(-c_N) / 2 - log_sigmoid(-r_N) / 2, mask_N)


def bco(pair: Pair, mask_N: jax.Array, *, beta: float = 0.1, shift: jax.Array | float = 0.0) -> jax.Array:
    """BCO for pairs (arXiv:2404.04656): −log σ(c − δ) − log σ(−(r − δ)).

    `shift` δ is the running mean of all implicit rewards, a constant the caller keeps.
    """
    c_N, r_N = (beta * x - jax.lax.stop_gradient(shift) for x in log_ratios(pair, mask_N))
    return live(-jax.nn.log_sigmoid(c_N) - jax.nn.log_sigmoid(-r_N), mask_N)


def sppo(pair: Pair, mask_N: jax.Array, *, beta: float = 0.1) -> jax.Array:
    """SPPO with hard labels (arXiv:2405.00675): (c/β − 1/(2β))² + (r/β + 1/(2β))²."""
    chosen_N, rejected_N = log_ratios(pair, mask_N)
    return live(jnp.square(chosen_N - 0.5 / beta) + jnp.square(rejected_N + 0.5 / beta), mask_N)


def apo_zero(pair: Pair, mask_N: jax.Array, *, beta: float = 0.1) -> jax.Array:
    """APO-zero (arXiv:2408.06266): 1 − σ(c) + σ(r), for chosen answers better than the model's own."""
    c_N, r_N = (beta * x for x in log_ratios(pair, mask_N))
    return live(jax.nn.sigmoid(-c_N) + jax.nn.sigmoid(r_N), mask_N)


def apo_down(pair: Pair, mask_N: jax.Array, *, beta: float = 0.1) -> jax.Array:
    """APO-down (arXiv:2408.06266): σ(c) + 1 − σ(c − r), for chosen answers worse than the model's own."""
    c_N, r_N = (beta * x for x in log_ratios(pair, mask_N))
    return live(jax.nn.sigmoid(c_N) + jax.nn.sigmoid(r_N - c_N), mask_N)


def discopop(pair: Pair, mask_N: jax.Array, *, beta: float = 0.1, tau: float = 0.05) -> jax.Array:
    """DiscoPOP (arXiv:2406.08414): −(1 − m)·log σ(βh) + m·e^(−βh) with m = σ(βh/τ)."""
    logit_N = _logit(pair, mask_N, beta)
    share_N = jax.nn.sigmoid(logit_N / tau)
    # Far on the negative side m is 0: the cap keeps it from meeting an infinity.
    exponential_N = jnp.exp(jnp.minimum(-logit_N, 80.0))
    return live(share_N * exponential_N - (1 - share_N) * jax.nn.log_sigmoid(logit_N), mask_N)


def kto_reference_point(logp_N: jax.Array, ref_logp_N: jax.Array, mask_N: jax.Array) -> jax.Array:
    """KTO's z: max(0, mean of log π_θ − log π_ref) over mismatched (prompt, answer) pairs; a scalar constant.

    Give it the batch of the whole update, before any split.
    """
    return jax.lax.stop_gradient(jnp.maximum(masked_mean(live(logp_N, mask_N) - live(ref_logp_N, mask_N), mask_N), 0.0))


def kto(
    logp_N: jax.Array,
    ref_logp_N: jax.Array,
    desirable_N: jax.Array,
    mask_N: jax.Array,
    *,
    reference_point: jax.Array | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> jax.Array:
    """KTO (arXiv:2402.01306), unpaired: w⁺·(1 − σ(β(ρ − z))) if desirable, else w⁻·(1 − σ(β(z − ρ))).

    ρ = log π_θ − log π_ref of the answer, z the constant of `kto_reference_point`.
    """
    rho_N = live(logp_N, mask_N) - jax.lax.stop_gradient(live(ref_logp_N, mask_N))
    gap_N = beta * (rho_N - jax.lax.stop_gradient(reference_point))
    good_N = desirable_weight * jax.nn.sigmoid(-gap_N)
    return live(jnp.where(desirable_N, good_N, undesirable_weight * jax.nn.sigmoid(gap_N)), mask_N)


def _log1mexp(x_N: jax.Array) -> jax.Array:
    """log(1 − e^x) for x < 0, accurate near 0 and far from it; x is kept at or below −1e-6."""
    x_N = jnp.minimum(x_N, -1e-6)
    near_N = x_N > -0.6931472
    near_value_N = jnp.log(-jnp.expm1(jnp.where(near_N, x_N, -0.5)))
    return jnp.where(near_N, near_value_N, jnp.log1p(-jnp.exp(jnp.where(near_N, -1.0, x_N))))


def orpo(chosen_mean_N: jax.Array, rejected_mean_N: jax.Array, mask_N: jax.Array, *, weight: float = 0.1) -> jax.Array:
    """ORPO (arXiv:2403.07691): −chosen − weight·log σ(log odds(chosen) − log odds(rejected)), no reference model.

    Both log-probs are means over the answer's tokens; odds are p/(1 − p) with p = exp(mean).
    """
    chosen_N, rejected_N = live(chosen_mean_N, mask_N, -1.0), live(rejected_mean_N, mask_N, -1.0)
    log_odds_N = chosen_N - _log1mexp(chosen_N) - (rejected_N - _log1mexp(rejected_N))
    return live(-chosen_N - weight * jax.nn.log_sigmoid(log_odds_N), mask_N)


def simpo(
    chosen_mean_N: jax.Array, rejected_mean_N: jax.Array, mask_N: jax.Array, *, beta: float = 2.0, gamma: float = 1.0
) -> jax.Array:
    """SimPO (arXiv:2405.14734): −log σ(β·(chosen − rejected) − γ) on means over tokens, no reference model.

    γ is the margin itself, as in the paper's formula (TRL's `simpo_gamma` too); γ/β is often quoted instead.
    """
    gap_N = live(chosen_mean_N, mask_N) - live(rejected_mean_N, mask_N)
    return live(-jax.nn.log_sigmoid(beta * gap_N - gamma), mask_N)


def cpo(
    chosen_N: jax.Array,
    rejected_N: jax.Array,
    chosen_length_N: jax.Array,
    mask_N: jax.Array,
    *,
    beta: float = 0.1,
    alpha: float = 1.0,
) -> jax.Array:
    """CPO (arXiv:2401.08417): −log σ(β·(chosen − rejected)) − alpha·chosen/length, on sums, no reference model."""
    chosen_N, rejected_N = live(chosen_N, mask_N), live(rejected_N, mask_N)
    nll_N = -chosen_N / jnp.maximum(live(chosen_length_N, mask_N), 1.0)
    return live(-jax.nn.log_sigmoid(beta * (chosen_N - rejected_N)) + alpha * nll_N, mask_N)


def bradley_terry(
    chosen_score_N: jax.Array,
    rejected_score_N: jax.Array,
    mask_N: jax.Array,
    *,
    margin_N: jax.Array | None = None,
    centring: float = 0.0,
) -> jax.Array:
    """Reward-model loss −log σ(chosen − rejected − margin) + centring·(chosen + rejected)².

    The margin is Llama 2's (arXiv:2307.09288), the centring term that of arXiv:2312.09244.
    """
    chosen_N, rejected_N = live(chosen_score_N, mask_N), live(rejected_score_N, mask_N)
    margin_N = jnp.zeros_like(chosen_N) if margin_N is None else live(margin_N, mask_N)
    loss_N = -jax.nn.log_sigmoid(chosen_N - rejected_N - margin_N)
    return live(loss_N + centring * jnp.square(chosen_N + rejected_N), mask_N)
