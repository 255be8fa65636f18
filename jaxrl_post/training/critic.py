"""The critic's programs: values of tokens, and the update towards their returns.

A critic's parameters are {"decoder", "head"}; it may hold the decoder as it is, the policy's, and learn the head alone.
The value of a token is that of the state it was sampled in: the head's number for the hidden state that predicts the
token. A critic's batch is a `TrainBatch` in which `old_logp` holds the values at sampling time and `advantage` the
returns.

Legend: A micro-batches, B rows, M targets of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxrl_post.models import scalar_head
from jaxrl_post.objectives.reductions import live, weighted_sum
from jaxrl_post.objectives.values import value_loss
from jaxrl_post.training.loss import Scalars, Tally
from jaxrl_post.training.optimizer import Optimizer
from jaxrl_post.training.state import StateShardings, TrainState
from jaxrl_post.training.update import Seen, jit_update, row_placement
from jaxrl_post.types import TrainBatch

Tree = Any
Values = Callable[[Tree, TrainBatch], jax.Array]  # (params, micro-batch) -> value_BM


def token_values(graphdef: nnx.GraphDef, batch_shardings: TrainBatch) -> Values:
    """The value of every target, float32 [B, M], exactly 0 and without gradient where masked."""
    place = row_placement(batch_shardings)

    def values(params: Tree, rows: TrainBatch) -> jax.Array:
        decoder = nnx.merge(graphdef, params["decoder"])
        x_BTD = decoder.hidden(rows.tokens, rows.positions, rows.segments, rows.branches, place)
        return live(scalar_head.scores_at(params["head"], x_BTD, rows.source), rows.mask)

    return values


def critic_micro_loss(
    values: Values, value_clip: float | None
) -> Callable[[Tree, TrainBatch, Tree], tuple[jax.Array, Seen]]:
    """`micro_loss` of `update.jit_update`: Σ weight · `values.value_loss`; held are parameters without gradient."""

    def micro_loss(params: Tree, rows: TrainBatch, held: Tree) -> tuple[jax.Array, Seen]:
        value_BM = values(params | held, rows)
        term_BM, stats = value_loss(value_BM, rows.old_logp, rows.advantage, rows.mask, clip=value_clip)
        loss = weighted_sum(term_BM, rows.mask, rows.weight)
        stats = {"critic/vf_clipfrac": stats["clipped"], "critic/vpred_mean": value_BM}
        return loss, (_tally(loss, stats, rows.mask), value_BM)

    return micro_loss


def make_critic_update(
    values: Values,
    optimizer: Optimizer,
    *,
    value_clip: float | None,
    shardings: StateShardings,
    held_shardings: Tree,
    batch_shardings: TrainBatch,
) -> Callable[[TrainState, TrainBatch, Any, Tree], tuple[TrainState, Scalars, jax.Array]]:
    """A jitted `update(state, batch, n_micro, held) -> (state, metrics, values)`, as `update.jit_update`.

    `held` are parameters beside those of the state, {} or {"decoder"}, which get no gradient and are not donated. The
    loss is that of `critic_micro_loss`. Metrics: `critic/{vf_loss, vf_clipfrac, vpred_mean, grad_norm, lr,
    skipped_update}`.
    """

    def metrics(tally: Tally, moved: Scalars) -> Scalars:
        means = {name: total / jnp.maximum(tally.tokens, 1.0) for name, total in tally.sums.items()}
        return tally.totals | means | {name.replace("actor/", "critic/"): x for name, x in moved.items()}

    return jit_update(
        critic_micro_loss(values, value_clip),
        optimizer,
        shardings=shardings,
        batch_shardings=batch_shardings,
        said_shardings=batch_shardings.old_logp,
        held_shardings=(held_shardings,),
        metrics=metrics,
    )


def _tally(loss: jax.Array, stats_BM: Scalars, mask_BM: jax.Array) -> Tally:
    sums = {name: jnp.sum(live(x_BM, mask_BM)) for name, x_BM in stats_BM.items()}
    return lax.stop_gradient(Tally(jnp.sum(mask_BM, dtype=jnp.float32), {"critic/vf_loss": loss}, sums, {}))
