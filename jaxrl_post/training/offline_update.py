"""The offline update: one XLA program from packed examples to new parameters. And its forward passes.

Legend: A micro-batches, B rows, T positions and M targets of a row, D width, S sequences of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_post.models import scalar_head
from jaxrl_post.training.logprobs import token_logprobs
from jaxrl_post.training.micro_batches import Score, make_scorer, micro
from jaxrl_post.training.optimizer import Optimizer
from jaxrl_post.training.preference_loss import OfflineLoss, Scalars
from jaxrl_post.training.state import StateShardings, TrainState
from jaxrl_post.training.update import apply_gradients, placed_gradient, row_placement
from jaxrl_post.types_offline import OfflineBatch

Tree = Any
# (params, micro-batch, constant of the update) -> what the loss reads
Forward = Callable[[Tree, OfflineBatch, Any], Any]
OfflineUpdate = Callable[[TrainState, OfflineBatch, Any, Any], tuple[TrainState, Scalars]]
Evaluate = Callable[[Tree, OfflineBatch, Any, Any], Scalars]


def language_model(graphdef: nnx.GraphDef, batch_shardings: OfflineBatch, chunk: int) -> Forward:
    """Log-prob and entropy of every target, float32 [B, M] each, at temperature 1."""
    place = row_placement(batch_shardings.rows)

    def forward(params: Tree, micro: OfflineBatch, _: Any) -> tuple[jax.Array, ...]:
        rows = micro.rows
        return token_logprobs(
            nnx.merge(graphdef, params),
            rows.tokens,
            rows.positions,
            rows.segments,
            rows.branches,
            rows.source,
            rows.target,
            rows.mask,
            temperature=1.0,
            chunk=chunk,
            place=place,
        )

    return forward


def reward_model(graphdef: nnx.GraphDef, batch_shardings: OfflineBatch) -> Forward:
    """The score of every sequence, float32 [B, S], from the hidden state of its last token.

    Parameters are {"decoder": …, "head": …}. Where a row has fewer sequences than S the score means nothing.
    """
    place = row_placement(batch_shardings.rows)

    def forward(params: Tree, micro: OfflineBatch, _: Any) -> tuple[jax.Array, ...]:
        rows = micro.rows
        decoder = nnx.merge(graphdef, params["decoder"])
        x_BTD = decoder.hidden(rows.tokens, rows.positions, rows.segments, rows.branches, place)
        return (scalar_head.scores_at(params["head"], x_BTD, micro.examples.last),)

    return forward


def make_offline_update(
    forward: Forward,
    optimizer: Optimizer,
    loss: OfflineLoss,
    *,
    shardings: StateShardings,
    batch_shardings: OfflineBatch,
    constant_shardings: Tree = None,
) -> OfflineUpdate:
    """A jitted `update(state, batch, constant, n_micro) -> (state, metrics)`; the state is donated.

    Gradients and metrics of the first `n_micro` micro-batches add up, in float32: weights in the batch already make
    their sums those of the whole update. `constant` is the loss's scalar, or what else its forward pass reads, on
    `constant_shardings` (None: on every device). Metrics beside the loss's own are those of `update.apply_gradients`.
    """

    measured = offline_micro_loss(forward, loss)

    def micro_loss(params: Tree, micro: OfflineBatch, constant: jax.Array) -> tuple[jax.Array, Scalars]:
        total, (metrics, _) = measured(params, micro, constant)
        return total, metrics

    gradient = placed_gradient(micro_loss, shardings.gradients)

    def update(
        state: TrainState, batch: OfflineBatch, constant: jax.Array, n_micro: jax.Array
    ) -> tuple[TrainState, Scalars]:
        grads, metrics = _summed(lambda part: gradient(state.params, part, constant), batch, n_micro)
        state, moved = apply_gradients(optimizer, state, grads, n_micro > 0)
        return state, metrics | moved

    everywhere = NamedSharding(shardings.step.mesh, PartitionSpec())
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=(shardings.state, batch_shardings, constant_shardings or everywhere, everywhere),
        out_shardings=(shardings.results, everywhere),
    )


def offline_micro_loss(
    forward: Forward, loss: OfflineLoss
) -> Callable[[Tree, OfflineBatch, Any], tuple[jax.Array, tuple[Scalars, jax.Array]]]:
    """The loss of a micro-batch, its metrics and what the model said: log-probs [B, M], or scores [B, S]."""

    def micro_loss(params: Tree, micro: OfflineBatch, constant: Any) -> tuple[jax.Array, tuple[Scalars, jax.Array]]:
        made = forward(params, micro, constant)
        total, metrics = loss(made, micro, constant)
        return total, (metrics, made["logp"] if isinstance(made, dict) else made[0])

    return micro_loss


def make_evaluate(
    forward: Forward,
    loss: OfflineLoss,
    *,
    params_shardings: Tree,
    batch_shardings: OfflineBatch,
    constant_shardings: Tree = None,
) -> Evaluate:
    """A jitted `evaluate(params, batch, constant, n_micro) -> metrics`: those of the loss, summed like an update's."""

    def evaluate(params: Tree, batch: OfflineBatch, constant: jax.Array, n_micro: jax.Array) -> Scalars:
        return _summed(lambda part: loss(forward(params, part, constant), part, constant)[1], batch, n_micro)

    everywhere = NamedSharding(batch_shardings.rows.target.mesh, PartitionSpec())
    return jax.jit(
        evaluate,
        in_shardings=(params_shardings, batch_shardings, constant_shardings or everywhere, everywhere),
        out_shardings=everywhere,
    )


def make_forward(forward: Forward, *, params_shardings: Tree, batch_shardings: OfflineBatch) -> Score:
    """`make_scorer` of the forward pass's first array: log-probs of targets for a language model, scores of sequences
    for a reward model."""
    return make_scorer(
        lambda params, part: forward(params, part, None)[0],
        params_shardings=params_shardings,
        batch_shardings=batch_shardings,
        said_shardings=batch_shardings.rows.old_logp,
    )


def _summed(one: Callable[[OfflineBatch], Tree], batch: OfflineBatch, n_micro: jax.Array) -> Tree:
    """Σ one(micro-batch) over the first `n_micro`."""
    shapes = jax.eval_shape(one, micro(batch, 0))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.fori_loop(0, n_micro, lambda i, total: jax.tree.map(jnp.add, total, one(micro(batch, i))), zeros)
