"""What training carries from update to update, and where it lives on the mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_post.training.optimizer import Optimizer
from sharding.placement import place, placed_shapes, tree_shardings
from sharding.rules import TRAIN, Rules

Tree = Any


class TrainState(NamedTuple):
    """`params` nested dict of arrays; `opt_state` optax's, moments in float32; `step` int32, calls of the update."""

    params: Tree
    opt_state: Tree
    step: Any


def init_state(params: Tree, optimizer: Optimizer, shardings: TrainState) -> TrainState:
    """Fresh optimizer state around `params`, placed by `state_shardings`; moments are born sharded.

    Parameters already in place are shared, not copied: an update that donates the state deletes the caller's arrays.
    """
    params = place(params, shardings.params)
    opt_state = jax.jit(_init_moments(optimizer), out_shardings=shardings.opt_state)(params)
    return TrainState(params, opt_state, place(np.int32(0), shardings.step))


def abstract_state(params: Tree, optimizer: Optimizer) -> TrainState:
    """Shapes and dtypes of the state of abstract (or real) `params`; nothing is allocated."""
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    return TrainState(shapes, jax.eval_shape(_init_moments(optimizer), shapes), jax.ShapeDtypeStruct((), jnp.int32))


def restorable_state(params: Tree, optimizer: Optimizer, shardings: TrainState) -> TrainState:
    """`abstract_state` with each array's sharding on it: what to restore a checkpoint into."""
    return placed_shapes(abstract_state(params, optimizer), shardings)


def state_shardings(params: Tree, axes: Tree, optimizer: Optimizer, mesh: Mesh, weights: Rules = TRAIN) -> TrainState:
    """A `NamedSharding` for each array of `abstract_state`: parameters by the rules of `weights`, moments by those of
    TRAIN, counters on every device.

    `params` and `axes` are those of `models.decoder.abstract`. Which leaves of the optimizer's state belong to which
    parameter is optax's own knowledge. Raises: ValueError as `sharding.placement.tree_shardings`.
    """
    state = abstract_state(params, optimizer)
    by_param = tree_shardings(axes, state.params, TRAIN, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_map_params(
        optimizer.transform.init,
        lambda _, sharding: sharding,
        state.opt_state,
        by_param,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(tree_shardings(axes, state.params, weights, mesh), opt_state, everywhere)


def first_moments(state: TrainState) -> Tree:
    """A tree like the parameters', and these themselves where the optimizer has no momentum.

    Of `state_shardings` it is where gradients lie: as the moments that they move.
    """
    return optax.tree_utils.tree_get(state.opt_state, "mu", default=state.params)


def _init_moments(optimizer: Optimizer) -> Any:
    """optax's init on float32 copies: moments keep full precision whatever the weights' dtype."""
    return lambda params: optimizer.transform.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
