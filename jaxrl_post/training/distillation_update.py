"""The update of a student under teachers: `training.update`'s, with the teachers' weights as an argument more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_post.training.distillation_loss import TaughtForward, TaughtLoss
from jaxrl_post.training.loss import Scalars
from jaxrl_post.training.optimizer import Optimizer
from jaxrl_post.training.state import StateShardings, TrainState
from jaxrl_post.training.update import Seen, jit_update
from jaxrl_post.types import TaughtBatch

Tree = Any
TaughtUpdate = Callable[[TrainState, TaughtBatch, Any, Sequence[Tree]], tuple[TrainState, Scalars, jax.Array]]


def make_taught_update(
    forward: TaughtForward,
    optimizer: Optimizer,
    loss: TaughtLoss,
    *,
    shardings: StateShardings,
    teacher_shardings: Sequence[Tree],
    batch_shardings: TaughtBatch,
) -> TaughtUpdate:
    """A jitted `update(state, batch, n_micro, teachers' params) -> (state, metrics, logp)`; the state is donated.

    As `update.make_update`; metrics are the loss's and those of `update.apply_gradients`.
    """
    return jit_update(
        taught_micro_loss(forward, loss),
        optimizer,
        shardings=shardings,
        batch_shardings=batch_shardings,
        said_shardings=batch_shardings.rows.old_logp,
        held_shardings=(tuple(teacher_shardings),),
    )


def taught_micro_loss(
    forward: TaughtForward, loss: TaughtLoss
) -> Callable[[Tree, TaughtBatch, Sequence[Tree]], tuple[jax.Array, Seen]]:
    """`micro_loss` of `update.jit_update`; the teachers' weights are held."""

    def micro_loss(params: Tree, micro: TaughtBatch, teachers: Sequence[Tree]) -> tuple[jax.Array, Seen]:
        made = forward(params, teachers, micro)
        total, tally = loss(made, micro.rows)
        return total, (tally, made["logp"])

    return micro_loss
