"""What training carries from update to update, and where it lives on the mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_post.training.optimizer import Optimizer
from sharding.memory import in_host_memory, of_result
from sharding.placement import place, placed_shapes, tree_shardings
from sharding.rules import TRAIN, ZERO, Stage

Tree = Any


class TrainState(NamedTuple):
    """`params` nested dict of arrays; `opt_state` optax's, moments in float32; `step` int32, calls of the update."""

    params: Tree
    opt_state: Tree
    step: Any


class StateShardings(NamedTuple):
    """A `NamedSharding` for each array of a `TrainState`, and of the gradients, a tree like the parameters'."""

    params: Tree
    opt_state: Tree
    step: Any
    gradients: Tree

    @property
    def state(self) -> TrainState:
        return TrainState(self.params, self.opt_state, self.step)

    @property
    def results(self) -> TrainState:
        """Of a program that makes a state."""
        return jax.tree.map(of_result, self.state)


def init_state(params: Tree, optimizer: Optimizer, shardings: StateShardings) -> TrainState:
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


def abstract_gradients(params: Tree, shardings: StateShardings) -> Tree:
    """Shapes and shardings of the sums of gradients, which are float32."""
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    return placed_shapes(shapes, shardings.gradients)


def restorable_state(params: Tree, optimizer: Optimizer, shardings: StateShardings) -> TrainState:
    """`abstract_state` with each array's sharding on it: what to restore a checkpoint into."""
    return placed_shapes(abstract_state(params, optimizer), shardings.state)


def state_shardings(
    params: Tree, axes: Tree, optimizer: Optimizer, mesh: Mesh, stage: Stage = ZERO[3], offload: bool = False
) -> StateShardings:
    """Where the arrays of `abstract_state` lie: parameters and gradients by the rules of `stage`, moments by those of
    TRAIN, with `offload` in the host's memory; counters on every device.

    `params` and `axes` are those of `models.decoder.abstract`. Which leaves of the optimizer's state belong to which
    parameter is optax's own knowledge. Raises: ValueError as `tree_shardings`.
    """
    state = abstract_state(params, optimizer)
    by_param = tree_shardings(axes, state.params, TRAIN, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_map_params(
        optimizer.transform.init,
        lambda _, sharding: in_host_memory(sharding) if offload else sharding,
        state.opt_state,
        by_param,
        transform_non_params=lambda _: everywhere,
    )
    weights, gradients = (tree_shardings(axes, state.params, rules, mesh) for rules in (stage.weights, stage.gradients))
    return StateShardings(weights, opt_state, everywhere, gradients)


def _init_moments(optimizer: Optimizer) -> Any:
    """optax's init on float32 copies: moments keep full precision whatever the weights' dtype."""
    return lambda params: optimizer.transform.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
