"""The update of a policy, a student's apart (`taught_update`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.stages import Traced

from jaxrl_post.loops.job import Job
from jaxrl_post.loops.packed import most_sequences
from jaxrl_post.loops.trained import Trained
from jaxrl_post.training.diagnosis import Probe, make_probe
from jaxrl_post.training.loss import Scalars, policy_loss
from jaxrl_post.training.packing import PackShape
from jaxrl_post.training.state import TrainState
from jaxrl_post.training.update import Rows, make_update, micro_batch_loss
from jaxrl_post.types import TrainBatch, Trajectory


class PolicyUpdate:
    """One compiled update; it reads rows as they are packed."""

    held: tuple[Any, ...] = ()
    """What the update reads beside state and batch: nothing."""

    def __init__(self, job: Job, shape: PackShape, shardings: Rows, trained: Trained):
        """Raises: ValueError when a custom loss cannot be had."""
        config, graphdef = job.config, job.network.graphdef
        self.shardings = shardings
        """Of batches."""
        self._params_shardings = trained.shardings.params
        loss = policy_loss(config.algorithm, most_sequences(job, shape))
        options: dict[str, Any] = {
            "temperature": config.rollout.temperature,
            "chunk": config.training.logprob_chunk,
            "batch_shardings": shardings,
            "entropy_gradient": config.algorithm.entropy_coef > 0,
            "mixture": config.model.moe if job.network.model.moe else None,
        }
        self._update: Any = make_update(graphdef, trained.optimizer, loss, shardings=trained.shardings, **options)
        self._probed = micro_batch_loss(graphdef, loss, **options)

    def attach(self, trajectories: Sequence[Trajectory], placed: TrainBatch, pack: Callable[..., Any]) -> TrainBatch:
        """The placed rows of these trajectories; nobody reads more."""
        return placed

    def __call__(self, state: TrainState, batch: Rows, n_micro: Any) -> tuple[TrainState, Scalars, jax.Array]:
        """As the function of `training.update.make_update`."""
        return self._update(state, batch, n_micro)

    def trace(self, state: TrainState, batch: Rows, n_micro: Any) -> Traced:
        """From abstract arguments."""
        return self._update.trace(state, batch, n_micro)

    def probe(self) -> Probe:
        """To look into updates with."""
        micro_loss, survey = self._probed
        return make_probe(micro_loss, self._params_shardings, survey)
