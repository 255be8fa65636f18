"""The loss of one micro-batch from its log-probs, and what adds up beside it into metrics.

Legend: B rows, M targets of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_post.config import GRPO
from jaxrl_post.objectives import kl
from jaxrl_post.objectives.reductions import live, weighted_sum
from jaxrl_post.objectives.surrogates import log_ratio, ppo_clip
from jaxrl_post.types import TrainBatch

Scalars = dict[str, jax.Array]
DIFFERENCE = "training/rollout_probs_diff"


class Tally(NamedTuple):
    """Float32 scalars of live tokens that combine over micro-batches.

    `tokens` is their number, `totals` are parts of the loss, `sums` become means over tokens, `peaks` are maxima ≥ 0.
    """

    tokens: jax.Array
    totals: Scalars
    sums: Scalars
    peaks: Scalars


# (logp_BM, entropy_BM, micro-batch with fields [B, T] and [B, M]) -> loss, tally
TokenLoss = Callable[[jax.Array, jax.Array, TrainBatch], tuple[jax.Array, Tally]]


def grpo_loss(algorithm: GRPO) -> TokenLoss:
    """Σ weight · (PPO clip + coef · KL to the reference) over the live targets."""

    def loss(logp_BM: jax.Array, entropy_BM: jax.Array, batch: TrainBatch) -> tuple[jax.Array, Tally]:
        mask_BM = batch.mask
        policy = ppo_clip(
            logp_BM,
            batch.old_logp,
            batch.advantage,
            mask_BM,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        total = weighted_sum(policy.term_BT, mask_BM, batch.weight)
        totals = {"actor/pg_loss": total}
        if algorithm.kl.coef:
            penalty_BM = kl.penalty(logp_BM, batch.ref_logp, mask_BM, algorithm.kl.estimator)
            totals["actor/kl_loss"] = weighted_sum(penalty_BM, mask_BM, batch.weight)
            total = total + algorithm.kl.coef * totals["actor/kl_loss"]
        stats = {
            "actor/ppo_kl": policy.stats["kl_to_old"],
            "actor/pg_clipfrac": policy.stats["clipped_high"] + policy.stats["clipped_low"],
            "actor/pg_clipfrac_lower": policy.stats["clipped_dual"],
            "actor/entropy": entropy_BM,
        }
        return total, tally(logp_BM, batch, totals, stats)

    return loss


def tally(logp_BM: jax.Array, batch: TrainBatch, totals: Scalars, stats_BM: Scalars) -> Tally:
    """Everything summed over live tokens, with the gap between the trainer's `logp` and the sampler's (no gradient)."""
    gap, probability_gap_BM, logp_gap_BM = _sampler_gap(logp_BM, batch)
    add = lambda x_BM: jnp.sum(live(x_BM, batch.mask))
    return lax.stop_gradient(
        Tally(
            jnp.sum(batch.mask, dtype=jnp.float32),
            totals,
            jax.tree.map(add, stats_BM | gap),
            {f"{DIFFERENCE}_max": probability_gap_BM.max(), "rollout_corr/logp_abs_diff_max": logp_gap_BM.max()},
        )
    )


def combine(a: Tally, b: Tally) -> Tally:
    add = lambda x, y: jax.tree.map(jnp.add, x, y)
    return Tally(
        a.tokens + b.tokens, add(a.totals, b.totals), add(a.sums, b.sums), jax.tree.map(jnp.maximum, a.peaks, b.peaks)
    )


def summarize(tally: Tally) -> Scalars:
    """Metrics of an update: parts of the loss as they are, means over its live tokens, maxima."""
    means = {name: value / jnp.maximum(tally.tokens, 1.0) for name, value in tally.sums.items()}
    square = means.pop(f"{DIFFERENCE}_square")
    means[f"{DIFFERENCE}_std"] = jnp.sqrt(jnp.maximum(square - means[f"{DIFFERENCE}_mean"] ** 2, 0.0))
    return tally.totals | means | tally.peaks


def _sampler_gap(logp_BM: jax.Array, batch: TrainBatch) -> tuple[Scalars, jax.Array, jax.Array]:
    """Per token: KL(π_rollout ‖ π_θ) by k1 and k3 (verl's rollout_corr), |Δ probability| and |Δ log-prob|, [B, M]."""
    logp_BM, rollout_BM = live(logp_BM, batch.mask), live(batch.rollout_logp, batch.mask)
    ratio_BM = log_ratio(logp_BM, rollout_BM, batch.mask)
    probability_BM = jnp.abs(jnp.exp(logp_BM) - jnp.exp(rollout_BM))
    gap = {
        "rollout_corr/kl": -ratio_BM,
        "rollout_corr/k3_kl": jnp.expm1(ratio_BM) - ratio_BM,
        f"{DIFFERENCE}_mean": probability_BM,
        f"{DIFFERENCE}_square": jnp.square(probability_BM),
    }
    return gap, probability_BM, jnp.abs(logp_BM - rollout_BM)
