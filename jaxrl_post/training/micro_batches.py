"""A batch whose arrays all have a leading A, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Tree = Any
Score = Callable[[Tree, Any, Any], jax.Array]


def micro(batch: Tree, i: jax.Array | int) -> Tree:
    """Micro-batch `i`."""
    return jax.tree.map(lambda field: lax.dynamic_index_in_dim(field, i, axis=0, keepdims=False), batch)


def make_scorer(
    one: Callable[[Tree, Tree], jax.Array],
    *,
    params_shardings: Tree,
    batch_shardings: Tree,
    said_shardings: NamedSharding,
) -> Score:
    """A jitted `score(params, batch, n_micro)`: `one(params, micro-batch)` of each, [A, …], 0 from `n_micro` on.

    What comes out lies on `said_shardings`.
    """

    def score(params: Tree, batch: Tree, n_micro: jax.Array) -> jax.Array:
        A, said = len(jax.tree.leaves(batch)[0]), jax.eval_shape(one, params, micro(batch, 0))
        body = lambda i, made: lax.dynamic_update_index_in_dim(made, one(params, micro(batch, i)), i, axis=0)
        return lax.fori_loop(0, n_micro, body, jnp.zeros((A, *said.shape), said.dtype))

    everywhere = NamedSharding(said_shardings.mesh, PartitionSpec())
    return jax.jit(score, in_shardings=(params_shardings, batch_shardings, everywhere), out_shardings=said_shardings)
