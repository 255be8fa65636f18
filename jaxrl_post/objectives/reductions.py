"""From per-token terms to numbers: loss weights, masked means, sums over the sequences of a packed row.

A loss is `weighted_sum(term_BT, mask_BT, weight_BT)` where the weights were made beforehand from the token counts of
the *whole* optimizer update, so any split into rows, micro-batches or devices adds up to the same number.

Legend: N sequences of the update, B rows, T target tokens of a row, S sequences of a row (static).
`sequence_BT` int32 holds each token's sequence inside its row, in [0, S); None means one sequence a row (S = 1).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def token_weights(lengths_N: np.ndarray, mode: str, scale_length: float | None = None) -> np.ndarray:
    """Weight float32 [N] that each token of a sequence carries in the loss; host-side numpy.

    `lengths_N` are the live tokens of every sequence of the optimizer update (all rows, micro-batches and devices).
    Sequences without live tokens weigh 0 and do not count in a mean over sequences. Modes, with n the number of
    sequences that have live tokens: token-mean 1/Σ length; token-sum 1; seq-mean-token-mean 1/(n·length) (GRPO,
    arXiv:2402.03300); seq-mean-token-sum 1/n; seq-mean-token-sum-norm 1/(n·scale_length) (Dr.GRPO,
    arXiv:2503.20783), the only mode that reads `scale_length`. Names are verl's `loss_agg_mode`.
    Raises ValueError on an unknown mode, on negative lengths, and when the norm mode lacks a positive `scale_length`.
    """
    lengths_N = np.asarray(lengths_N, np.float64)
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation={mode!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
    if (lengths_N < 0).any():
        raise ValueError(f"lengths_N holds {lengths_N.min():g}; token counts must be 0 or more")
    if mode == "seq-mean-token-sum-norm" and not (scale_length and scale_length > 0):
        raise ValueError(f"scale_length={scale_length} must be a positive token count for seq-mean-token-sum-norm")
    live_N = lengths_N > 0
    sequences = max(live_N.sum(), 1)
    denominator_N = {
        "token-mean": lengths_N.sum(),
        "token-sum": 1.0,
        "seq-mean-token-mean": sequences * lengths_N,
        "seq-mean-token-sum": sequences,
        "seq-mean-token-sum-norm": sequences * (scale_length or 1.0),
    }[mode]
    return np.divide(1.0, denominator_N, out=np.zeros_like(lengths_N), where=live_N).astype(np.float32)


def live(x_BT: jax.Array, mask_BT: jax.Array, fill: float = 0.0) -> jax.Array:
    """`x` in float32 where the mask is True, else `fill`: what lies under the mask reaches neither value nor gradient.

    Clean inputs with it *before* exp, log or a product; cleaning only the result still gives a NaN gradient.
    """
    return jnp.where(mask_BT, jnp.asarray(x_BT, jnp.float32), fill)


def weighted_sum(x_BT: jax.Array, mask_BT: jax.Array, weight_BT: jax.Array) -> jax.Array:
    """Σ weight·x over live tokens, a float32 scalar."""
    return jnp.sum(live(x_BT, mask_BT) * live(weight_BT, mask_BT))


def masked_mean(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Mean over live entries, any shape, a float32 scalar; 0 when none is live."""
    return jnp.sum(live(x_BT, mask_BT)) / jnp.maximum(jnp.sum(mask_BT, dtype=jnp.float32), 1.0)


def _member_BST(mask_BT: jax.Array, sequence_BT: jax.Array | None, num_sequences: int) -> jax.Array:
    if sequence_BT is None:
        if num_sequences != 1:
            raise ValueError(f"num_sequences={num_sequences} needs sequence_BT; without it a row is one sequence")
        return mask_BT[:, None, :]
    ids_S = jnp.arange(num_sequences)
    return mask_BT[:, None, :] & (sequence_BT[:, None, :] == ids_S[None, :, None])


def sequence_sum(
    x_BT: jax.Array, mask_BT: jax.Array, sequence_BT: jax.Array | None = None, num_sequences: int = 1
) -> jax.Array:
    """Sum of the live tokens of every sequence, float32 [B, S]; 0 for a sequence without any.

    A select-and-reduce over [B, S, T], which XLA fuses, rather than a scatter: the order of addition is fixed on
    every backend.
    """
    member_BST = _member_BST(mask_BT, sequence_BT, num_sequences)
    return jnp.sum(jnp.where(member_BST, live(x_BT, mask_BT)[:, None, :], 0.0), axis=-1)


def sequence_length(mask_BT: jax.Array, sequence_BT: jax.Array | None = None, num_sequences: int = 1) -> jax.Array:
    """Live tokens of every sequence, float32 [B, S]."""
    return jnp.sum(_member_BST(mask_BT, sequence_BT, num_sequences), axis=-1, dtype=jnp.float32)


def sequence_mean(
    x_BT: jax.Array, mask_BT: jax.Array, sequence_BT: jax.Array | None = None, num_sequences: int = 1
) -> jax.Array:
    """Mean over the live tokens of every sequence, float32 [B, S]; 0 for a sequence without any."""
    length_BS = sequence_length(mask_BT, sequence_BT, num_sequences)
    return sequence_sum(x_BT, mask_BT, sequence_BT, num_sequences) / jnp.maximum(length_BS, 1.0)


def sequence_max(
    x_BT: jax.Array, mask_BT: jax.Array, sequence_BT: jax.Array | None = None, num_sequences: int = 1
) -> jax.Array:
    """Largest live token of every sequence, float32 [B, S]; -inf for a sequence without any."""
    member_BST = _member_BST(mask_BT, sequence_BT, num_sequences)
    return jnp.max(jnp.where(member_BST, live(x_BT, mask_BT)[:, None, :], -jnp.inf), axis=-1)


def spread(x_BS: jax.Array, mask_BT: jax.Array, sequence_BT: jax.Array | None = None) -> jax.Array:
    """Each live token's own sequence value, float32 [B, T]; 0 under the mask. The inverse of `sequence_*`."""
    member_BST = _member_BST(mask_BT, sequence_BT, x_BS.shape[1])
    return jnp.sum(jnp.where(member_BST, jnp.asarray(x_BS, jnp.float32)[:, :, None], 0.0), axis=1)
