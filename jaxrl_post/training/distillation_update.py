"""The update of a student under teachers: `training.update`'s, with the teachers' weights as an argument more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_post.training.distillation_loss import TaughtForward, TaughtLoss
from jaxrl_post.training.loss import Scalars, summarize
from jaxrl_post.training.optimizer import Optimizer
from jaxrl_post.training.state import TrainState
from jaxrl_post.training.update import Seen, accumulate, apply_gradients, placed_gradient
from jaxrl_post.types import TaughtBatch

Tree = Any
TaughtUpdate = Callable[[TrainState, TaughtBatch, Sequence[Tree], Any], tuple[TrainState, Scalars, jax.Array]]


def make_taught_update(
    forward: TaughtForward,
    optimizer: Optimizer,
    loss: TaughtLoss,
    *,
    shardings: TrainState,
    teacher_shardings: Sequence[Tree],
    batch_shardings: TaughtBatch,
) -> TaughtUpdate:
    """A jitted `update(state, batch, teachers' params, n_micro) -> (state, metrics, logp)`; the state is donated.

    As `update.make_update`; metrics are the loss's and those of `update.apply_gradients`.
    """

    def micro_loss(params: Tree, micro: TaughtBatch, teachers: Sequence[Tree]) -> tuple[jax.Array, Seen]:
        made = forward(params, teachers, micro)
        total, tally = loss(made, micro.rows)
        return total, (tally, made["logp"])

    gradient = placed_gradient(micro_loss, shardings.params)

    def update(
        state: TrainState, batch: TaughtBatch, teachers: Sequence[Tree], n_micro: jax.Array
    ) -> tuple[TrainState, Scalars, jax.Array]:
        taught_gradient = lambda params, micro: gradient(params, micro, teachers)
        grads, (tally, logp_ABM) = accumulate(taught_gradient, state.params, batch, n_micro)
        state, metrics = apply_gradients(optimizer, state, grads, jnp.asarray(n_micro) > 0)
        return state, summarize(tally) | metrics, logp_ABM

    everywhere = NamedSharding(shardings.step.mesh, PartitionSpec())
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=(shardings, batch_shardings, tuple(teacher_shardings), everywhere),
        out_shardings=(shardings, everywhere, batch_shardings.rows.old_logp),
    )
