"""What a loss needs to know of all the answers of an update before it: means of log π_θ − log π_ref.

Legend: A micro-batches, B rows, M targets, E examples of a row, S sequences of a row.
"""

from __future__ import annotations

import jax

from jaxrl_post.objectives.preference import kto_reference_point
from jaxrl_post.objectives.reductions import sequence_length, sequence_sum, weighted_sum
from jaxrl_post.types_offline import OfflineBatch


@jax.jit
def reference_point(logp_ABM: jax.Array, batch: OfflineBatch) -> jax.Array:
    return kto_reference_point(_sums(logp_ABM, batch), _sums(batch.rows.ref_logp, batch), _sums_live(batch))


@jax.jit
def mean_ratio(logp_ABM: jax.Array, batch: OfflineBatch) -> jax.Array:
    """Mean of log π_θ − log π_ref over all answers of all pairs."""
    ratio_ABS = _sums(logp_ABM, batch) - _sums(batch.rows.ref_logp, batch)
    ratio_ABE = (ratio_ABS[..., 0::2] + ratio_ABS[..., 1::2]) / 2
    return weighted_sum(ratio_ABE, batch.examples.weight > 0, batch.examples.weight)


def _sums(x_ABM: jax.Array, batch: OfflineBatch) -> jax.Array:
    S = batch.examples.last.shape[-1]
    return jax.vmap(lambda x, mask, sequence: sequence_sum(x, mask, sequence, S))(
        x_ABM, batch.rows.mask, batch.rows.sequence
    )


def _sums_live(batch: OfflineBatch) -> jax.Array:
    S = batch.examples.last.shape[-1]
    return jax.vmap(lambda mask, sequence: sequence_length(mask, sequence, S))(batch.rows.mask, batch.rows.sequence) > 0
