"""Correction for samples drawn by a policy π_ro (the rollout) other than π_old (the trainer's, before the update).

Every correction takes `old_logp_BT, rollout_logp_BT, mask_BT` and gives a `Correction`, constants without gradient;
multiply the policy term by its weight. With w = π_old/π_ro of a token, its log clamped to ±20. A dropped token has
weight 0 and stays in the loss's denominator; verl takes it out, so to follow verl count lengths with `keep`.

Legend: B rows, T target tokens of a row, S sequences of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.objectives.reductions import (
    live,
    masked_mean,
    sequence_length,
    sequence_max,
    sequence_mean,
    sequence_sum,
    spread,
)
from jaxrl_post.objectives.surrogates import MAX_LOG_RATIO, constant, log_ratio

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
DIVERGENCES = ("k1", "k2", "k3")


class Correction(NamedTuple):
    """`weight` float32 [B, T], 0 where dropped or masked; `keep` bool [B, T], the mask less the dropped tokens."""

    weight: jax.Array
    keep: jax.Array


def _log_weight(old_logp_BT: jax.Array, rollout_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    return constant(log_ratio(old_logp_BT, rollout_logp_BT, mask_BT), mask_BT)


def _correction(weight_BT: jax.Array, keep_BT: jax.Array, mask_BT: jax.Array) -> Correction:
    return Correction(live(weight_BT, mask_BT & keep_BT), mask_BT & keep_BT)


def _check_band(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"low={low} must be below high={high}")


def token_tis(
    old_logp_BT: jax.Array, rollout_logp_BT: jax.Array, mask_BT: jax.Array, *, low: float = 0.0, high: float = 2.0
) -> Correction:
    """Truncated importance sampling per token: clip(w, low, high) (verl `token`, slime `--use-tis`)."""
    _check_band(low, high)
    weight_BT = jnp.exp(_log_weight(old_logp_BT, rollout_logp_BT, mask_BT))
    return _correction(jnp.clip(weight_BT, low, high), mask_BT, mask_BT)


def sequence_tis(
    old_logp_BT: jax.Array,
    rollout_logp_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    low: float = 0.0,
    high: float = 5.0,
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> Correction:
    """Truncated importance sampling per sequence: clip(exp Σ_t log w, low, high) on each of its tokens."""
    _check_band(low, high)
    log_BT = _log_weight(old_logp_BT, rollout_logp_BT, mask_BT)
    total_BS = sequence_sum(log_BT, mask_BT, sequence_BT, num_sequences)
    weight_BS = jnp.clip(jnp.exp(jnp.clip(total_BS, -MAX_LOG_RATIO, MAX_LOG_RATIO)), low, high)
    return _correction(spread(weight_BS, mask_BT, sequence_BT), mask_BT, mask_BT)


def _inside_geometric_band(log_BT, mask_BT, low, high, sequence_BT, num_sequences) -> jax.Array:
    _check_band(low, high)
    mean_BS = jnp.exp(sequence_mean(log_BT, mask_BT, sequence_BT, num_sequences))
    return spread((mean_BS >= low) & (mean_BS <= high), mask_BT, sequence_BT) > 0


def geometric(
    old_logp_BT: jax.Array,
    rollout_logp_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    low: float = 0.999,
    high: float = 1.001,
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> Correction:
    """Weight 1 for sequences whose geometric mean exp(mean_t log w) lies in [low, high]; the others are dropped."""
    log_BT = _log_weight(old_logp_BT, rollout_logp_BT, mask_BT)
    keep_BT = _inside_geometric_band(log_BT, mask_BT, low, high, sequence_BT, num_sequences)
    return _correction(jnp.ones_like(log_BT), keep_BT, mask_BT)


def icepop(
    old_logp_BT: jax.Array, rollout_logp_BT: jax.Array, mask_BT: jax.Array, *, low: float = 0.5, high: float = 5.0
) -> Correction:
    """IcePop (arXiv:2510.18855): w for tokens whose w lies in [low, high]; the others are dropped."""
    _check_band(low, high)
    weight_BT = jnp.exp(_log_weight(old_logp_BT, rollout_logp_BT, mask_BT))
    return _correction(weight_BT, (weight_BT >= low) & (weight_BT <= high), mask_BT)


def sequence_mask_tis(
    old_logp_BT: jax.Array,
    rollout_logp_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    low: float = 0.5,
    high: float = 5.0,
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> Correction:
    """Token weights w, with sequences dropped whose geometric mean leaves [low, high] (OpenRLHF, NeMo seq-mask-tis)."""
    log_BT = _log_weight(old_logp_BT, rollout_logp_BT, mask_BT)
    keep_BT = _inside_geometric_band(log_BT, mask_BT, low, high, sequence_BT, num_sequences)
    return _correction(jnp.exp(log_BT), keep_BT, mask_BT)


def _divergence(log_BT: jax.Array, estimator: str) -> jax.Array:
    """Estimates of KL(π_ro ‖ π_old) from tokens of π_ro; k1 by its size, so that a bound acts on both sides."""
    if estimator == "k1":
        return jnp.abs(log_BT)
    return jnp.square(log_BT) / 2 if estimator == "k2" else jnp.expm1(log_BT) - log_BT


def kl_rejection(
    old_logp_BT: jax.Array,
    rollout_logp_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    estimator: str,
    level: str,
    upper: float,
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> Correction:
    """Weight 1 for what stays within `upper`, by a KL estimate per token or over the sequence (verl `rollout_rs`).

    `estimator` is k1, k2 or k3; `level` token drops tokens, seq_sum, seq_mean and seq_max drop whole sequences by the
    sum, mean or maximum of their tokens. k1 is compared by size: |sum|, |mean| or the largest |k1|.
    Raises ValueError on other names.
    """
    if estimator not in DIVERGENCES or level not in LEVELS:
        raise ValueError(
            f"estimator={estimator!r}, level={level!r}: choose an estimator of {', '.join(DIVERGENCES)} "
            f"and a level of {', '.join(LEVELS)}"
        )
    log_BT = _log_weight(old_logp_BT, rollout_logp_BT, mask_BT)
    token_BT = _divergence(log_BT, estimator)
    if level == "token":
        return _correction(jnp.ones_like(log_BT), token_BT <= upper, mask_BT)
    reduce = {"seq_sum": sequence_sum, "seq_mean": sequence_mean, "seq_max": sequence_max}[level]
    signed_BT = log_BT if estimator == "k1" and level != "seq_max" else token_BT
    value_BS = jnp.abs(reduce(signed_BT, mask_BT, sequence_BT, num_sequences))
    return _correction(jnp.ones_like(log_BT), spread(value_BS <= upper, mask_BT, sequence_BT) > 0, mask_BT)


def batch_norm_factor(
    correction: Correction, sequence_BT: jax.Array | None = None, num_sequences: int = 1, *, by_sequence: bool
) -> jax.Array:
    """What to divide weights by so that they average 1 (verl `rollout_is_batch_normalize`), a float32 scalar.

    Their mean over kept tokens; `by_sequence`, for weights that a sequence's tokens share, over sequences. Give it the
    batch of the whole update, before any split. 1 where all weights are zero.
    """
    weight_BT, keep_BT = correction
    mean = masked_mean(weight_BT, keep_BT)
    if by_sequence:
        sequences = (keep_BT, sequence_BT, num_sequences)
        mean = masked_mean(sequence_mean(weight_BT, *sequences), sequence_length(*sequences) > 0)
    return jnp.where(mean > 0, mean, 1.0)


def _smallest(x: jax.Array, present: jax.Array) -> jax.Array:
    """The least present value, 0 when there is none, so that a metric is always a finite number."""
    return jnp.where(jnp.any(present), jnp.min(live(x, present, jnp.inf)), 0.0)


def _largest(x: jax.Array, present: jax.Array) -> jax.Array:
    return -_smallest(-x, present)


def divergence_metrics(
    old_logp_BT: jax.Array,
    rollout_logp_BT: jax.Array,
    mask_BT: jax.Array,
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> dict[str, jax.Array]:
    """How far π_old is from π_ro, scalars named as verl's `rollout_corr/*` (mean over tokens, or over sequences).

    kl is KL(π_ro ‖ π_old) by k1, k3_kl by k3; ppl metrics are means over sequences, log_ppl_diff being
    log ppl(π_old) − log ppl(π_ro); chi2_token and chi2_seq are mean w² − 1 over tokens and over sequences.
    """
    log_BT = _log_weight(old_logp_BT, rollout_logp_BT, mask_BT)
    sequences = (mask_BT, sequence_BT, num_sequences)
    present_BS = sequence_length(*sequences) > 0
    trainer_BS = -sequence_mean(old_logp_BT, *sequences)
    rollout_BS = -sequence_mean(rollout_logp_BT, *sequences)
    difference_BS = trainer_BS - rollout_BS
    total_BS = jnp.clip(2 * sequence_sum(log_BT, *sequences), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics = {
        "kl": masked_mean(-log_BT, mask_BT),
        "k3_kl": masked_mean(_divergence(log_BT, "k3"), mask_BT),
        "training_log_ppl": masked_mean(trainer_BS, present_BS),
        "training_ppl": masked_mean(jnp.exp(trainer_BS), present_BS),
        "rollout_log_ppl": masked_mean(rollout_BS, present_BS),
        "rollout_ppl": masked_mean(jnp.exp(rollout_BS), present_BS),
        "ppl_ratio": masked_mean(jnp.exp(difference_BS), present_BS),
        "log_ppl_diff": masked_mean(difference_BS, present_BS),
        "log_ppl_diff_min": _smallest(difference_BS, present_BS),
        "log_ppl_diff_max": _largest(difference_BS, present_BS),
        "log_ppl_abs_diff": masked_mean(jnp.abs(difference_BS), present_BS),
        "chi2_token": masked_mean(jnp.expm1(jnp.minimum(2 * log_BT, MAX_LOG_RATIO)), mask_BT),
        "chi2_seq": masked_mean(jnp.expm1(total_BS), present_BS),
    }
    return {f"rollout_corr/{k}": v for k, v in metrics.items()}


def correction_metrics(
    correction: Correction,
    mask_BT: jax.Array,
    *,
    low: float,
    high: float,
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> dict[str, jax.Array]:
    """What a correction did, scalars named as verl's `rollout_corr/rollout_is_*` and `rollout_rs_*`.

    Weights of the kept tokens: mean, population std, min, max, effective sample size as a fraction 1/mean((w/mean)²),
    fractions at or beyond `high` and `low`; fractions of live tokens, and of sequences (any token), dropped.
    """
    weight_BT, keep_BT = correction
    mean = masked_mean(weight_BT, keep_BT)
    square = masked_mean(jnp.square(weight_BT), keep_BT)
    present_BS = sequence_length(mask_BT, sequence_BT, num_sequences) > 0
    dropped_BT = live(~keep_BT, mask_BT)
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_std": jnp.sqrt(masked_mean(jnp.square(weight_BT - mean), keep_BT)),
        "rollout_is_min": _smallest(weight_BT, keep_BT),
        "rollout_is_max": _largest(weight_BT, keep_BT),
        "rollout_is_eff_sample_size": jnp.square(mean) / jnp.where(square > 0, square, 1.0),
        "rollout_is_ratio_fraction_high": masked_mean(weight_BT >= high, keep_BT),
        "rollout_is_ratio_fraction_low": masked_mean(weight_BT <= low, keep_BT),
        "rollout_rs_masked_fraction": masked_mean(dropped_BT, mask_BT),
        "rollout_rs_seq_masked_fraction": masked_mean(
            sequence_sum(dropped_BT, mask_BT, sequence_BT, num_sequences) > 0, present_BS
        ),
    }
    return {f"rollout_corr/{k}": v for k, v in metrics.items()}
