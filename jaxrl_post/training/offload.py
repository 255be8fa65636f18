"""An optimizer step on moments that lie in the host's memory: a slice at a time on the device.

A copy of all moments at the end would take the room that their absence made. So stacked weights are moved in a loop
over their layers and the others after them. The loops run once the gradient is known to be of use, else not at all; the
compiler would otherwise copy the moments before the first micro-batch, as they depend on nothing that is made later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sharding.memory import put_back, to_device

Tree = Any
Step = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]  # (params, opt_state, grads) -> params, opt_state
STACKED = "layers"


def step_in_slices(
    step: Step, init: Callable[[Tree], Tree], params: Tree, opt_state: Tree, grads: Tree, go: jax.Array
) -> tuple[Tree, Tree]:
    """`step(params, opt_state, grads)` where `go`, else parameters and state as they are.

    `step` must treat every element by itself, as Adam does; `init` is the optimizer's, whose state `opt_state` is.
    """
    times = jnp.int32(go)
    stacked = jax.tree_util.tree_map_with_path(lambda path, _: STACKED in (key.key for key in path), params)
    rest = jax.tree.map(lambda x: not x, stacked)
    parts = []
    for mask, move in ((stacked, _layer_by_layer), (rest, _at_once)):
        own = lambda tree, mask=mask: jax.tree.map(_if_own, mask, tree)
        state = optax.tree_map_params(init, lambda x, is_own: _if_own(is_own, x), opt_state, mask)
        parts.append(move(step, own(params), state, own(grads), times))
    return jax.tree.map(_either, *parts, is_leaf=_is_hole)


def _layer_by_layer(step: Step, params: Tree, opt_state: Tree, grads: Tree, times: jax.Array) -> tuple[Tree, Tree]:
    """Counters stay: the step over the other weights moves them."""

    def layer(i: jax.Array, moved: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        of_layer = lambda tree: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, False) if x.ndim else x, tree)
        params, opt_state = map(of_layer, moved)
        after = put_back(step(params, to_device(opt_state), of_layer(grads)), (params, opt_state))
        write = lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0) if x.ndim else x
        return jax.tree.map(write, moved, after)

    layers = max((len(x) for x in jax.tree.leaves(params)), default=0)
    return lax.fori_loop(0, times * layers, layer, (params, opt_state))


def _at_once(step: Step, params: Tree, opt_state: Tree, grads: Tree, times: jax.Array) -> tuple[Tree, Tree]:
    once = lambda _, moved: put_back(step(moved[0], to_device(moved[1]), grads), moved)
    return lax.fori_loop(0, times, once, (params, opt_state))


def _if_own(is_own: bool, x: Any) -> Any:
    return x if is_own else optax.MaskedNode()


def _either(of_layers: Any, of_rest: Any) -> Any:
    """What both hold, a counter, is right in the second."""
    return of_layers if _is_hole(of_rest) else of_rest


def _is_hole(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
