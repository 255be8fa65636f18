"""On-policy distillation by the advantage: how much likelier a teacher finds each sampled token than the student did.

N samples of a step, R = rollout.max_new_tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_post.config_teachers import TaughtAdvantage
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.measures import Metrics
from jaxrl_post.loops.packed import by_number, mini_batches, numbered, pack_update, update_shape
from jaxrl_post.loops.teachers import Teachers
from jaxrl_post.models.decoder import Params
from jaxrl_post.objectives.distillation import teacher_advantage
from jaxrl_post.observe.progress import Phases
from jaxrl_post.training.state import TrainState
from jaxrl_post.training.update import batch_shardings, make_score
from jaxrl_post.types import Trajectory
from sharding.placement import place
from sharding.processes import fetch


class TaughtAdvantages:
    """The compiled scoring programs of a run's teachers."""

    def __init__(self, job: Job, options: TaughtAdvantage, teachers: Teachers, learner: Learner):
        self._job, self._options, self._teachers, self._learner = job, options, teachers, learner
        self._shape = update_shape(job, job.config.rollout.max_new_tokens, lessons=True)
        teachers.check_row(self._shape.length)
        self._batch_shardings = batch_shardings(self._shape, job.network.mesh)
        self._scores = [
            make_score(
                graphdef,
                temperature=job.config.rollout.temperature,
                chunk=job.config.training.logprob_chunk,
                params_shardings=teachers.layout(number),
                batch_shardings=self._batch_shardings,
            )
            for number, graphdef in enumerate(teachers.graphdefs)
        ]

    def assign(
        self, trajectories: Sequence[Trajectory], state: TrainState, phases: Phases
    ) -> tuple[list[Trajectory], Metrics]:
        """reward_weight · A − coef · (log π_old − log π_teacher), token by token, for trajectories that are trained on.

        `distillation/opd_reverse_kl` is the mean of the log-ratio over their tokens: it estimates KL(π_old ‖ teacher).
        """
        old = self._learner.old_logprobs(state, trajectories, phases)
        with phases("teacher"):
            teacher = self.log_probs(state.params, trajectories)
        taught = [
            dataclasses.replace(t, advantage=self._advantage(t, *logp)) if t.train else t
            for t, *logp in zip(trajectories, old, teacher, strict=True)
        ]
        gaps = np.concatenate([a - b for a, b in zip(old, teacher, strict=True)])
        return taught, {"distillation/opd_reverse_kl": float(gaps.mean())} if len(gaps) else {}

    def log_probs(self, student: Params, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """log π_teacher of each sampled token after the prompt the teacher sees, float32 [n] a trajectory, [0] for one
        that is not trained on. `student` are the policy's weights, where it teaches itself."""
        found = [np.zeros(0, np.float32)] * len(trajectories)
        for number, score in enumerate(self._scores):
            weights = self._teachers.weights(number, student)
            mine = [_as_seen(t, number) for t in trajectories]
            logp = []
            for mini in mini_batches(mine, self._job.config.algorithm.mini_batches):
                batch, n_micro, _ = pack_update(self._job, numbered(mini), self._shape, keep_all=True)
                logp_ABM = score(weights, place(batch, self._batch_shardings), n_micro)
                logp += by_number(fetch(logp_ABM), batch.advantage, len(mini))
            found = [new if len(new) else before for before, new in zip(found, logp, strict=True)]
        return found

    def _advantage(self, t: Trajectory, old: np.ndarray, teacher: np.ndarray) -> np.ndarray:
        """float32 [n]."""
        R = self._job.config.rollout.max_new_tokens
        own = self._options.reward_weight * np.broadcast_to(t.advantage, len(old))
        padded = [np.pad(np.float32(x), (0, R - len(old)))[None] for x in (own, old, teacher)]
        mask_1R = (np.arange(R) < len(old))[None]
        return np.asarray(_taught(*padded, mask_1R, self._options.coef))[0, : len(old)]


def _as_seen(t: Trajectory, teacher: int) -> Trajectory:
    """With the prompt the teacher sees; left out of the rows where it grades others."""
    prompt = t.prompt_ids if t.lesson.prompt_ids is None else t.lesson.prompt_ids
    return dataclasses.replace(t, prompt_ids=prompt, train=t.train and t.lesson.teacher == teacher)


@functools.partial(jax.jit, static_argnums=4)
def _taught(
    advantage_NR: jax.Array, logp_NR: jax.Array, teacher_NR: jax.Array, mask_NR: jax.Array, coef: float
) -> jax.Array:
    return teacher_advantage(advantage_NR, logp_NR, teacher_NR, mask_NR, coef=coef)
