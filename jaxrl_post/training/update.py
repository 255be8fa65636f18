"""The update step: one XLA program from packed micro-batches to new parameters. And scoring, its forward half.

Legend: A micro-batches (the most there can be), B rows, T positions and M targets of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_post.config_model import Mixture
from jaxrl_post.models.moe import Routing
from jaxrl_post.models.placement import Placement
from jaxrl_post.training import routing
from jaxrl_post.training.logprobs import target_logprobs
from jaxrl_post.training.loss import Scalars, Tally, TokenLoss, combine, summarize
from jaxrl_post.training.micro_batches import Score, make_scorer, micro
from jaxrl_post.training.offload import step_in_slices
from jaxrl_post.training.optimizer import Optimizer, clip
from jaxrl_post.training.packing import POSITION_FIELDS, PackShape, empty_batch
from jaxrl_post.training.state import StateShardings, TrainState
from jaxrl_post.types import RoutedBatch, TrainBatch
from sharding.memory import lies_on_host
from sharding.placement import tree_shardings
from sharding.rules import TRAIN, Rules

Tree = Any
Rows = TrainBatch | RoutedBatch
Update = Callable[[TrainState, Any, Any], tuple[TrainState, Scalars, jax.Array]]
Seen = tuple[Tally, jax.Array]  # what adds up over micro-batches, and what the model said of each target, [B, M]


def make_update(
    graphdef: nnx.GraphDef,
    optimizer: Optimizer,
    token_loss: TokenLoss,
    *,
    temperature: float,
    chunk: int,
    shardings: StateShardings,
    batch_shardings: Rows,
    entropy_gradient: bool = False,
    mixture: Mixture | None = None,
) -> Update:
    """A jitted `update(state, batch, n_micro) -> (state, metrics, logp)`; the state is donated.

    Gradients of the first `n_micro` (int32) micro-batches add up in float32; the weights in the batch already make
    their sum the gradient of the whole update. With `n_micro` 0, or a loss or gradient that is not finite, parameters
    and moments stay as they are; `step`, and with it the learning-rate schedule, advances in any case.
    `token_loss` gets an entropy that carries a gradient only with `entropy_gradient`.
    Metrics are float32 scalars under verl's names: those of `loss.summarize`, `actor/grad_norm` (before clipping),
    `actor/lr`, `actor/skipped_update` (1 when loss or norm was not finite).
    `logp` float32 [A, B, M] is log π_θ of the targets before the update, 0 in micro-batches that were not used.
    A model with experts needs their options, `mixture`: routers add to loss and metrics as `training.routing` says. A
    `RoutedBatch` is computed along its choices.
    """
    micro_loss, survey = micro_batch_loss(
        graphdef,
        token_loss,
        temperature=temperature,
        chunk=chunk,
        batch_shardings=batch_shardings,
        entropy_gradient=entropy_gradient,
        mixture=mixture,
    )
    return jit_update(
        micro_loss,
        optimizer,
        shardings=shardings,
        batch_shardings=batch_shardings,
        said_shardings=routing.parts(batch_shardings)[0].old_logp,
        metrics=routing.load_metrics if mixture else update_metrics,
        survey=survey,
    )


def micro_batch_loss(
    graphdef: nnx.GraphDef,
    token_loss: TokenLoss,
    *,
    temperature: float,
    chunk: int,
    batch_shardings: Rows,
    entropy_gradient: bool = False,
    mixture: Mixture | None = None,
) -> tuple[Callable[..., tuple[jax.Array, Seen]], Callable[[Tree, Tree, jax.Array], tuple[Any, ...]]]:
    """`micro_loss` and `survey` of `jit_update`, for a policy; arguments as `make_update`."""
    place = row_placement(routing.parts(batch_shardings)[0])

    def micro_loss(params: Tree, micro: Rows, whole: routing.Whole | None = None) -> tuple[jax.Array, Seen]:
        logp_BM, entropy_BM, routed = _logprobs(graphdef, params, micro, temperature, chunk, place, entropy_gradient)
        loss, tally = token_loss(logp_BM, entropy_BM, routing.parts(micro)[0])
        if mixture and routed and whole:
            loss, tally = routing.with_router(loss, tally, routed, micro, whole, mixture)
        return loss, (tally, logp_BM)

    return micro_loss, routing.survey(graphdef, place, mixture) if mixture else no_survey


def update_metrics(tally: Tally, moved: Scalars) -> Scalars:
    """Those of `loss.summarize` and of `apply_gradients`."""
    return summarize(tally) | moved


def no_survey(params: Tree, batch: Tree, n_micro: jax.Array) -> tuple[()]:
    """Micro-batches need to know nothing of each other."""
    return ()


def jit_update(
    micro_loss: Callable[..., tuple[jax.Array, Seen]],
    optimizer: Optimizer,
    *,
    shardings: StateShardings,
    batch_shardings: Tree,
    said_shardings: Any,
    held_shardings: Sequence[Tree] = (),
    metrics: Callable[[Tally, Scalars], Scalars] = update_metrics,
    survey: Callable[[Tree, Tree, jax.Array], tuple[Any, ...]] = no_survey,
) -> Callable[..., tuple[TrainState, Scalars, jax.Array]]:
    """A jitted `update(state, batch, n_micro, *held) -> (state, metrics, said)`; the state is donated.

    `micro_loss(params, micro-batch, *held) -> (loss, (tally, what the model said of each target [B, M]))`. `held` are
    parameters beside those of the state, on `held_shardings`: they get no gradient and are not donated. `metrics` are
    made from the whole update's tally and those of `apply_gradients`. What `survey(params, batch, n_micro)` finds out
    about the whole update goes to each `micro_loss` after `held`.
    """
    gradient = placed_gradient(micro_loss, shardings.gradients)

    def update(
        state: TrainState, batch: Tree, n_micro: jax.Array, *held: Tree
    ) -> tuple[TrainState, Scalars, jax.Array]:
        found = survey(state.params, batch, n_micro)
        beside = lambda params, part: gradient(params, part, *held, *found)
        grads, (tally, said_ABM) = accumulate(beside, state.params, batch, n_micro)
        state, moved = apply_gradients(optimizer, state, grads, jnp.asarray(n_micro) > 0)
        return state, metrics(tally, moved), said_ABM

    everywhere = NamedSharding(shardings.step.mesh, PartitionSpec())
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=(shardings.state, batch_shardings, everywhere, *held_shardings),
        out_shardings=(shardings.results, everywhere, said_shardings),
    )


def make_score(
    graphdef: nnx.GraphDef, *, temperature: float, chunk: int, params_shardings: Tree, batch_shardings: Rows
) -> Score:
    """A jitted `score(params, batch, n_micro) -> logp` float32 [A, B, M], 0 at dead targets: π_old or π_ref.

    A `RoutedBatch` is computed along its choices.
    """
    rows_shardings, _ = routing.parts(batch_shardings)
    place = row_placement(rows_shardings)
    return make_scorer(
        lambda params, part: _logprobs(graphdef, params, part, temperature, chunk, place)[0],
        params_shardings=params_shardings,
        batch_shardings=batch_shardings,
        said_shardings=rows_shardings.old_logp,
    )


def batch_shardings(shape: PackShape, mesh: Mesh, rules: Rules = TRAIN) -> TrainBatch:
    """Rows over the batch axes, positions over `sequence`; micro-batches and targets whole.

    Raises: ValueError when rows or positions do not divide.
    """
    widths = ("length" if name in POSITION_FIELDS else None for name in TrainBatch._fields)
    axes = TrainBatch(*((None, "batch", width) for width in widths))
    return tree_shardings(axes, empty_batch(shape), rules, mesh)


def accumulate(
    gradient: Callable[[Tree, Any], tuple[Tree, Seen]], params: Tree, batch: Tree, n_micro: jax.Array
) -> tuple[Tree, Seen]:
    """Gradients and tallies of the first `n_micro` micro-batches, added up in a loop that nothing differentiates;
    beside them what the model said of each target, float32 [A, B, M]."""

    def body(i: jax.Array, carry: tuple[Tree, Seen]) -> tuple[Tree, Seen]:
        sums, (tally, said_ABM) = carry
        grads, (more, said_BM) = gradient(params, micro(batch, i))
        said_ABM = lax.dynamic_update_index_in_dim(said_ABM, said_BM, i, axis=0)
        return jax.tree.map(jnp.add, sums, grads), (combine(tally, more), said_ABM)

    grads, (tally, said_BM) = jax.eval_shape(gradient, params, micro(batch, jnp.int32(0)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, tally))
    A = len(jax.tree.leaves(batch)[0])
    return lax.fori_loop(0, n_micro, body, (zeros[0], (zeros[1], jnp.zeros((A, *said_BM.shape)))))


def apply_gradients(
    optimizer: Optimizer, state: TrainState, grads: Tree, has_signal: jax.Array
) -> tuple[TrainState, Scalars]:
    """Clip, transform, move the parameters by the scheduled rate; kept as they were without signal or finite norm."""
    grads, norm = clip(grads, optimizer.max_grad_norm)
    rate = optimizer.learning_rate(state.step)
    finite = jnp.isfinite(norm)
    before, useful = (state.params, state.opt_state), finite & has_signal

    def step(params: Tree, opt_state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        changes, opt_state = optimizer.transform.update(grads, opt_state, params)
        move = lambda p, u: (p.astype(jnp.float32) - rate * u).astype(p.dtype)
        return jax.tree.map(move, params, changes), opt_state

    if lies_on_host(state.opt_state):
        params, opt_state = step_in_slices(step, optimizer.transform.init, *before, grads, useful)
    else:
        params, opt_state = jax.tree.map(lambda x, y: jnp.where(useful, x, y), step(*before, grads), before)
    metrics = {
        "actor/grad_norm": norm,
        "actor/lr": rate,
        "actor/skipped_update": 1.0 - finite.astype(jnp.float32),
    }
    return TrainState(params, opt_state, state.step + 1), metrics


def placed_gradient(loss: Callable[..., tuple[jax.Array, Any]], shardings: Tree) -> Callable[..., tuple[Tree, Any]]:
    """From `loss(params, ...) -> (loss, tally)` to `(gradients, tally)`: float32, on these shardings.

    Of a loss that is not finite no gradient is, so that its norm tells of both.
    """

    def gradient(params: Tree, *arguments: Any) -> tuple[Tree, Any]:
        (total, tally), grads = jax.value_and_grad(loss, has_aux=True)(params, *arguments)
        grads = lax.with_sharding_constraint(jax.tree.map(lambda g: g.astype(jnp.float32), grads), shardings)
        wrong = jnp.where(jnp.isfinite(total), 0.0, jnp.nan)
        return jax.tree.map(lambda g: g + wrong, grads), tally

    return gradient


def _logprobs(
    graphdef: nnx.GraphDef,
    params: Tree,
    micro: Rows,
    temperature: float,
    chunk: int,
    place: Placement,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array, Routing | None]:
    """As `logprobs.token_logprobs`, and the routing."""
    decoder, rows = nnx.merge(graphdef, params), routing.parts(micro)[0]
    x_BTD, routed = routing.routed_rows(decoder, micro, place)
    logp_BM, entropy_BM = target_logprobs(
        decoder,
        x_BTD,
        rows.source,
        rows.target,
        rows.mask,
        place,
        temperature=temperature,
        chunk=chunk,
        entropy_gradient=entropy_gradient,
    )
    return logp_BM, entropy_BM, routed


def row_placement(batch_shardings: TrainBatch) -> Placement:
    """Keeps activations [B, T, D] cut like the rows, so that layers gather weights, which are smaller, not rows."""
    tokens = batch_shardings.tokens
    return Placement(NamedSharding(tokens.mesh, PartitionSpec(*tokens.spec[1:])))
