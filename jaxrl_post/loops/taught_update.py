"""The update of a student whose loss is a divergence to its teachers, in the place of a policy loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_post.config_distillation import Distillation
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.packed import numbered
from jaxrl_post.loops.teachers import Teachers
from jaxrl_post.loops.trained import Trained
from jaxrl_post.training.diagnosis import Probe, make_probe
from jaxrl_post.training.distillation_loss import distillation_loss, taught_forward
from jaxrl_post.training.distillation_update import make_taught_update, taught_micro_loss
from jaxrl_post.training.loss import Scalars
from jaxrl_post.training.packing import PackShape
from jaxrl_post.training.state import TrainState
from jaxrl_post.training.teacher_view import taught_shardings, teacher_view
from jaxrl_post.training.update import row_placement
from jaxrl_post.types import TaughtBatch, TrainBatch, Trajectory
from sharding.placement import place

Pack = Callable[[Sequence[Trajectory]], TrainBatch]  # all of them, as the batch to be taught was packed


class TaughtUpdate:
    """One compiled update, and the teachers' side of its batches."""

    def __init__(
        self,
        job: Job,
        algorithm: Distillation,
        teachers: Teachers,
        shape: PackShape,
        trained: Trained,
    ):
        teachers.check_row(shape.length)
        self._teachers, self._params_shardings = teachers, trained.shardings.params
        self.shardings = taught_shardings(shape, job.network.mesh)
        """Of batches."""
        self._forward = taught_forward(
            job.network.graphdef,
            teachers.graphdefs,
            algorithm,
            temperature=job.config.rollout.temperature,
            chunk=job.config.training.logprob_chunk,
            place=row_placement(self.shardings.rows),
            entropy_gradient=algorithm.entropy_coef > 0,
        )
        self._loss = distillation_loss(algorithm)
        self._update = make_taught_update(
            self._forward,
            trained.optimizer,
            self._loss,
            shardings=trained.shardings,
            teacher_shardings=teachers.shardings,
            batch_shardings=self.shardings,
        )

    def attach(self, trajectories: Sequence[Trajectory], placed: TrainBatch, pack: Pack) -> TaughtBatch:
        """The placed rows of these trajectories with what the teachers read."""
        view = teacher_view(pack(numbered(trajectories)), [t.lesson for t in trajectories])
        return TaughtBatch(placed, place(view, self.shardings.view))

    def __call__(self, state: TrainState, batch: TaughtBatch, n_micro: Any) -> tuple[TrainState, Scalars, jax.Array]:
        """As the function of `training.update.make_update`."""
        return self._update(state, batch, n_micro, *self.held)

    @property
    def held(self) -> tuple[Any, ...]:
        """What the update reads beside state and batch: the teachers' weights."""
        return (self._teachers.params,)

    def probe(self) -> Probe:
        """To look into updates with; `held` as an argument more."""
        return make_probe(taught_micro_loss(self._forward, self._loss), self._params_shardings)
