"""The loss of one micro-batch from its log-probs, and what adds up beside it into metrics.

Legend: B rows, M targets of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_post.config_algorithms import KL, PolicyMethod
from jaxrl_post.objectives import kl
from jaxrl_post.objectives.reductions import live, weighted_sum
from jaxrl_post.objectives.sequence_surrogates import off_policy_keep
from jaxrl_post.objectives.surrogates import log_ratio
from jaxrl_post.training.surrogate import correct, policy_term
from jaxrl_post.types import TrainBatch

Scalars = dict[str, jax.Array]
DIFFERENCE = "training/rollout_probs_diff"
STATS = {"kl_to_old": "actor/ppo_kl", "clipped_dual": "actor/pg_clipfrac_lower"}


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
# (logp_BM, entropy_BM, micro-batch) -> metric, coefficient, value of each token
Regularizer = Callable[[jax.Array, jax.Array, TrainBatch], tuple[str, float, jax.Array]]
# (term_BM, logp_BM, micro-batch) -> reweighted term, statistics
Reweight = Callable[[jax.Array, jax.Array, TrainBatch], tuple[jax.Array, Scalars]]


def policy_loss(algorithm: PolicyMethod, num_sequences: int) -> TokenLoss:
    """Σ weight · (surrogate · correction + coef · KL to the reference − coef · entropy) over the live targets.

    `num_sequences` is the most sequences a row may hold. What a correction drops leaves the numerator only.
    """
    policy, terms = policy_term(algorithm, num_sequences), regularizers(algorithm)
    reweight = _reweighting(algorithm, num_sequences)

    def loss(logp_BM: jax.Array, entropy_BM: jax.Array, batch: TrainBatch) -> tuple[jax.Array, Tally]:
        term_BM, stats = policy(logp_BM, batch)
        term_BM, correction_stats = reweight(term_BM, logp_BM, batch)
        total = weighted_sum(term_BM, batch.mask, batch.weight)
        totals = {"actor/pg_loss": total}
        for term in terms:
            name, coef, value_BM = term(logp_BM, entropy_BM, batch)
            totals[name] = weighted_sum(value_BM, batch.mask, batch.weight)
            total = total + coef * totals[name]
        stats = named_stats(stats) | correction_stats | {"actor/entropy": entropy_BM}
        return total, tally(logp_BM, batch, totals, stats)

    return loss


def regularizers(algorithm: PolicyMethod) -> list[Regularizer]:
    """What the loss adds to the surrogate: a KL to the reference, an entropy bonus; none where its coefficient is 0."""
    terms: list[Regularizer] = []
    if algorithm.kl_in_loss:
        terms.append(lambda logp_BM, _, batch: ("actor/kl_loss", algorithm.kl.coef, _kl(algorithm.kl, logp_BM, batch)))
    if algorithm.entropy_coef:
        terms.append(lambda _, entropy_BM, batch: ("actor/entropy_loss", -algorithm.entropy_coef, entropy_BM))
    return terms


def named_stats(stats_BM: Scalars) -> Scalars:
    """A surrogate's statistics under verl's names, where it has one; the ratio's mean tells nothing and is left out."""
    stats = {k: v for k, v in stats_BM.items() if k != "ratio"}
    named = {}
    if "clipped_high" in stats and "clipped_low" in stats:
        named["actor/pg_clipfrac"] = stats.pop("clipped_high") + stats.pop("clipped_low")
    return named | {STATS.get(name, f"actor/{name}"): value for name, value in stats.items()}


def _kl(options: KL, logp_BM: jax.Array, batch: TrainBatch) -> jax.Array:
    if options.importance_corrected:
        return kl.importance_corrected(logp_BM, batch.old_logp, batch.ref_logp, batch.mask, options.estimator)
    return kl.penalty(logp_BM, batch.ref_logp, batch.mask, options.estimator)


def _reweighting(algorithm: PolicyMethod, num_sequences: int) -> Reweight:
    """Multiplies terms by the correction's weights and the off-policy mask; as they are where neither is asked for."""
    correction = correct(algorithm.correction, num_sequences) if algorithm.correction else None
    by_old = algorithm.old_logprobs == "trainer"

    def reweight(term_BM: jax.Array, logp_BM: jax.Array, batch: TrainBatch) -> tuple[jax.Array, Scalars]:
        stats: Scalars = {}
        if correction is not None:
            weight_BM, keep_BM = correction(batch.old_logp if by_old else logp_BM, batch)
            term_BM = term_BM * weight_BM
            stats["rollout_corr/rollout_rs_masked_fraction"] = ~keep_BM
        if algorithm.off_policy_mask is not None:
            keep_BM = off_policy_keep(
                logp_BM,
                batch.old_logp,
                batch.advantage,
                batch.mask,
                delta=algorithm.off_policy_mask,
                sequence_BT=batch.sequence,
                num_sequences=num_sequences,
            )
            term_BM = term_BM * keep_BM
            stats["actor/off_policy_masked_fraction"] = 1.0 - keep_BM
        return term_BM, stats

    return reweight


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
