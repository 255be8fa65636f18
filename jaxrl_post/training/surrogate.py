"""From a method's options to its policy loss and its correction, as functions of the log-probs and a micro-batch.

Legend: B rows, M targets of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.config_algorithms import (
    CISPO,
    DPPO,
    GMPO,
    GPG,
    GSPO,
    SAPO,
    TOPR,
    BinaryKL,
    Clipped,
    Custom,
    Geometric,
    IcePop,
    KLRejection,
    PolicyGradient,
    PolicyMethod,
    SequenceMaskTIS,
    SequenceTIS,
    TokenTIS,
    TotalVariation,
)
from jaxrl_post.objectives import mismatch, sequence_surrogates, surrogates
from jaxrl_post.objectives.surrogates import Surrogate
from jaxrl_post.training.custom_loss import load_loss
from jaxrl_post.types import TrainBatch

PolicyTerm = Callable[[jax.Array, TrainBatch], Surrogate]  # (logp_BM, micro-batch) -> loss of each token, statistics
Correct = Callable[[jax.Array, TrainBatch], mismatch.Correction]  # (logp_BM of the trainer, micro-batch)
AnyCorrection = TokenTIS | SequenceTIS | IcePop | SequenceMaskTIS | Geometric | KLRejection


def policy_term(algorithm: PolicyMethod, num_sequences: int) -> PolicyTerm:
    """The method's surrogate; `num_sequences` is the most sequences a row may hold.

    Raises: ValueError when a custom function cannot be had.
    """
    sequences = num_sequences
    match algorithm:
        case Clipped(clip_low=low, clip_high=high, dual_clip=dual):
            return _per_token(surrogates.ppo_clip, clip_low=low, clip_high=high, dual_clip=dual)
        case CISPO(clip_low=low, clip_high=high):
            return _per_token(surrogates.cispo, clip_low=low, clip_high=high)
        case SAPO(tau_positive=positive, tau_negative=negative):
            return _per_token(surrogates.sapo, tau_positive=positive, tau_negative=negative)
        case DPPO(region=TotalVariation(low=low, high=high), max_ratio=most):
            return _per_token(surrogates.dppo_tv, delta_low=low, delta_high=high, max_ratio=most)
        case DPPO(region=BinaryKL(limit=limit), max_ratio=most):
            return _per_token(surrogates.dppo_kl, delta=limit, max_ratio=most)
        case PolicyGradient() | GPG():
            return _per_token(surrogates.policy_gradient)
        case GSPO(clip_low=low, clip_high=high, level=level):
            return _per_sequence(sequence_surrogates.gspo, sequences, clip_low=low, clip_high=high, level=level)
        case GMPO(clip_low=low, clip_high=high):
            return _per_sequence(sequence_surrogates.gmpo, sequences, clip_low=low, clip_high=high)
        case TOPR(level=level):
            return _per_sequence(sequence_surrogates.topr, sequences, level=level)
        case Custom(function=path, options=options):
            function, looks_at_sequences = load_loss(path, options)
            return (
                _per_sequence(function, sequences, **options) if looks_at_sequences else _per_token(function, **options)
            )
    raise AssertionError(f"kind {algorithm.kind} has no surrogate")


def correct(correction: AnyCorrection, num_sequences: int) -> Correct:
    """The correction's weights, from the trainer's log-probs and those of the sampler."""
    sequences = num_sequences
    match correction:
        case TokenTIS(low=low, high=high):
            return _against_sampler(mismatch.token_tis, None, low=low, high=high)
        case IcePop(low=low, high=high):
            return _against_sampler(mismatch.icepop, None, low=low, high=high)
        case SequenceTIS(low=low, high=high):
            return _against_sampler(mismatch.sequence_tis, sequences, low=low, high=high)
        case SequenceMaskTIS(low=low, high=high):
            return _against_sampler(mismatch.sequence_mask_tis, sequences, low=low, high=high)
        case Geometric(low=low, high=high):
            return _against_sampler(mismatch.geometric, sequences, low=low, high=high)
        case KLRejection(estimator=estimator, level=level, upper=upper):
            return _against_sampler(mismatch.kl_rejection, sequences, estimator=estimator, level=level, upper=upper)


def sampler_metrics(algorithm: PolicyMethod, num_sequences: int) -> Callable[[TrainBatch], dict[str, jax.Array]]:
    """verl's `rollout_corr/*` of a whole update, exact: from a batch [A, B, M] whose `old_logp` is the trainer's."""

    def metrics(batch: TrainBatch) -> dict[str, jax.Array]:
        flat = TrainBatch(*(field.reshape(-1, field.shape[-1]) for field in batch))
        sequences = _sequences(flat, num_sequences)
        found = mismatch.divergence_metrics(flat.old_logp, flat.rollout_logp, flat.mask, **sequences)
        if algorithm.correction is None:
            return found
        low, high = _bounds(algorithm.correction)
        correction = correct(algorithm.correction, num_sequences)(flat.old_logp, flat)
        if algorithm.normalizes_weights:
            factor = batch_norm_factor(algorithm.correction, num_sequences)(batch)
            found["rollout_corr/rollout_is_batch_norm_factor"] = factor
        return found | mismatch.correction_metrics(correction, flat.mask, low=low, high=high, **sequences)

    return metrics


def weighed_advantage(algorithm: PolicyMethod, num_sequences: int) -> Callable[[TrainBatch], jax.Array]:
    """Advantages of a whole update over the mean weight of its correction, where that is to be 1; else as they are.

    Every surrogate that may be weighed so is linear in a positive factor of the advantage, so that this divides each
    weight by their mean, whatever the update is split into.
    """
    match algorithm.correction:
        case TokenTIS(batch_normalize=True) | SequenceTIS(batch_normalize=True) as correction:
            factor = batch_norm_factor(correction, num_sequences)
            return lambda batch: batch.advantage / factor(batch)
    return lambda batch: batch.advantage


def batch_norm_factor(correction: AnyCorrection, num_sequences: int) -> Callable[[TrainBatch], jax.Array]:
    """The mean weight of a whole update [A, B, M] whose `old_logp` is the trainer's, a float32 scalar."""

    def factor(batch: TrainBatch) -> jax.Array:
        flat = TrainBatch(*(field.reshape(-1, field.shape[-1]) for field in batch))
        weights = correct(correction, num_sequences)(flat.old_logp, flat)
        by_sequence = isinstance(correction, SequenceTIS)
        return mismatch.batch_norm_factor(weights, **_sequences(flat, num_sequences), by_sequence=by_sequence)

    return factor


def _bounds(correction: AnyCorrection) -> tuple[float, float]:
    return (0.0, jnp.inf) if isinstance(correction, KLRejection) else (correction.low, correction.high)


def _per_token(function: Callable[..., Surrogate], **options: Any) -> PolicyTerm:
    return lambda logp_BM, batch: function(logp_BM, batch.old_logp, batch.advantage, batch.mask, **options)


def _per_sequence(function: Callable[..., Surrogate], num_sequences: int, **options: Any) -> PolicyTerm:
    def term(logp_BM: jax.Array, batch: TrainBatch) -> Surrogate:
        sequences = _sequences(batch, num_sequences)
        return function(logp_BM, batch.old_logp, batch.advantage, batch.mask, **sequences, **options)

    return term


def _against_sampler(
    function: Callable[..., mismatch.Correction], num_sequences: int | None, **options: Any
) -> Correct:
    def weights(logp_BM: jax.Array, batch: TrainBatch) -> mismatch.Correction:
        sequences = _sequences(batch, num_sequences) if num_sequences else {}
        return function(logp_BM, batch.rollout_logp, batch.mask, **sequences, **options)

    return weights


def _sequences(batch: TrainBatch, num_sequences: int) -> dict[str, Any]:
    return {"sequence_BT": batch.sequence, "num_sequences": num_sequences}
