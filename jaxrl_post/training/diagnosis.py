"""Where an update's numbers stop being finite: its micro-batches one by one, looked at from the inside.

Legend: A micro-batches, B rows, M targets of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.training.micro_batches import micro
from jaxrl_post.training.update import no_survey, placed_gradient
from sharding.placement import named_leaves
from sharding.processes import fetch

Tree = Any
# (params, batch, n_micro, micro-batch, *held) -> its loss, what the model said of each target and gradients
Probe = Callable[..., tuple[jax.Array, jax.Array, Tree]]


class Diagnosis(NamedTuple):
    """`losses` of the micro-batches, whose sum is the update's; gradient `norms` by parameter, before clipping; `first`
    names the first place that is not finite, in the order of computing, or is empty."""

    losses: list[float]
    norms: dict[str, float]
    first: str


def make_probe(
    micro_loss: Callable[..., tuple[jax.Array, tuple[Any, jax.Array]]],
    params_shardings: Tree,
    survey: Callable[[Tree, Tree, jax.Array], tuple[Any, ...]] = no_survey,
) -> Probe:
    """Jitted, from what `training.update.jit_update` is made of."""

    def told(params: Tree, part: Tree, *beside: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        loss, (_, said_BM) = micro_loss(params, part, *beside)
        return loss, (loss, said_BM)

    gradient = placed_gradient(told, params_shardings)

    def probe(
        params: Tree, batch: Tree, n_micro: jax.Array, i: jax.Array, *held: Tree
    ) -> tuple[jax.Array, jax.Array, Tree]:
        grads, (loss, said_BM) = gradient(params, micro(batch, i), *held, *survey(params, batch, n_micro))
        return loss, said_BM, grads

    return jax.jit(probe)


def diagnose(probe: Probe, params: Tree, batch: Tree, n_micro: int, *held: Tree) -> Diagnosis:
    """The update on `params` [placed] of a packed batch [placed], without making it; `held` as in `jit_update`."""
    places = [*_bad_leaves("parameter", params), *_bad_elements(batch)]
    losses, total = [], None
    for i in range(n_micro):
        loss, said_BM, grads = probe(params, batch, np.int32(n_micro), np.int32(i), *held)
        losses.append(float(fetch(loss)))
        places += _bad_probe(i, losses[-1], fetch(said_BM), grads)
        total = grads if total is None else _added(total, grads)
    norms = {} if total is None else {name: math.sqrt(x) for name, x in named_leaves(fetch(_squares(total)))}
    return Diagnosis(losses, norms, places[0] if places else "")


def _bad_probe(i: int, loss: float, said_BM: np.ndarray, grads: Tree) -> Iterator[str]:
    where = np.argwhere(~np.isfinite(said_BM))
    if len(where):
        row, target = where[0].tolist()
        yield f"what the model says in micro-batch {i}, row {row}, target {target} ({len(where)} of {said_BM.size})"
    if not math.isfinite(loss):
        yield f"loss of micro-batch {i}: {loss}"
    yield from _bad_leaves(f"gradient of micro-batch {i} of", grads)


def _bad_leaves(what: str, tree: Tree) -> list[str]:
    return [f"{what} {name}" for name, finite in named_leaves(fetch(_finite(tree))) if not finite]


def _bad_elements(batch: Tree) -> Iterator[str]:
    """Fields as packed."""
    for name, field in named_leaves(fetch(batch)):
        where = np.argwhere(~np.isfinite(field))
        if len(where):
            yield f"batch field {name}{where[0].tolist()}: {field[tuple(where[0])]} ({len(where)} of {field.size})"


_finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))
_squares = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.sum(x * x), tree))
_added = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
