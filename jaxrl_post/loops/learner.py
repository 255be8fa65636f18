"""The learning half of a step: from trajectories to new parameters, over epochs and mini-batches.

P prompts a step, G samples each; A micro-batches, B rows, M targets of an update.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.stages import Traced

from jaxrl_post.config_distillation import Distillation
from jaxrl_post.loops.faulty_update import Skips, read_fault
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.measures import Metrics, floats, mean_metrics
from jaxrl_post.loops.packed import by_number, mini_batches, most_sequences, numbered, pack_update, update_shape
from jaxrl_post.loops.policy_update import PolicyUpdate
from jaxrl_post.loops.taught_update import TaughtUpdate
from jaxrl_post.loops.teachers import NO_TEACHERS, Teachers
from jaxrl_post.loops.trained import make_trained
from jaxrl_post.models.decoder import Params
from jaxrl_post.models.moe import record_dtype
from jaxrl_post.observe.progress import Phases
from jaxrl_post.training.balance import seqlen_metrics
from jaxrl_post.training.diagnosis import Diagnosis, diagnose
from jaxrl_post.training.micro_batches import Score
from jaxrl_post.training.packing import empty_batch
from jaxrl_post.training.routing import choice_sharding, packed_choices, routed
from jaxrl_post.training.state import TrainState
from jaxrl_post.training.surrogate import sampler_metrics, weighed_advantage
from jaxrl_post.training.update import Rows, batch_shardings, make_score
from jaxrl_post.types import RoutedBatch, TrainBatch, Trajectory
from sharding.placement import place, placed_shapes, reshard
from sharding.processes import fetch

FIRST_UPDATE = ("training/rollout_probs_diff", "rollout_corr/")  # sampler against trainer: before the policy moves


class Learner:
    """The compiled update and scoring programs of a run, and the frozen reference policy where a KL asks for one."""

    def __init__(self, job: Job, teachers: Teachers = NO_TEACHERS):
        """Holds no weights yet. Raises: ValueError when a custom loss cannot be had."""
        config, algorithm = job.config, job.config.algorithm
        self._job = job
        updates = algorithm.epochs * algorithm.mini_batches
        self.trained = make_trained(job.network, config.optimizer, config.steps, updates)
        self._lessons = isinstance(algorithm, Distillation)  # teachers' prompts lie in the same rows
        self.shape = update_shape(job, config.rollout.max_new_tokens, self._lessons)
        self._batch_shardings: TrainBatch = batch_shardings(self.shape, job.network.mesh)
        self._replays = config.model.moe.routing_replay
        read: Rows = self._batch_shardings
        if self._replays:
            read = RoutedBatch(self._batch_shardings, choice_sharding(self._batch_shardings))
        self._update: PolicyUpdate | TaughtUpdate
        if isinstance(algorithm, Distillation):
            self._update = TaughtUpdate(job, algorithm, teachers, self.shape, self.trained)
        else:
            self._update = PolicyUpdate(job, self.shape, read, self.trained)
        score = functools.partial(
            make_score,
            job.network.graphdef,
            params_shardings=self.trained.shardings.params,
            temperature=config.rollout.temperature,
            chunk=config.training.logprob_chunk,
        )
        self._score = score(batch_shardings=self._batch_shardings)
        self._score_policy = score(batch_shardings=read) if self._replays else self._score
        num_sequences = most_sequences(job, self.shape)
        self._sampler_metrics = jax.jit(sampler_metrics(algorithm, num_sequences))
        self._advantage = jax.jit(
            weighed_advantage(algorithm, num_sequences), out_shardings=self._batch_shardings.advantage
        )
        self._reference: Params | None = None
        self._skips = Skips(config)

    @property
    def needs_reference(self) -> bool:
        return self._job.config.algorithm.kl.coef > 0

    def keep_reference(self, params: Params) -> None:
        """Copy the frozen policy of the KL, where `needs_reference`; before the first `learn`."""
        if self.needs_reference:
            self._reference = reshard(params, self.trained.shardings.params)

    def traced_update(self) -> Traced:
        """The update from abstract arguments; nothing is allocated on a device. Raises: ValueError for a student's."""
        if isinstance(self._update, TaughtUpdate):
            raise ValueError("algorithm.kind=distillation: its update, with teachers, cannot be planned yet")
        rows: TrainBatch = placed_shapes(empty_batch(self.shape), self._batch_shardings)
        batch: Rows = rows
        moe = self._job.network.model.moe
        if self._replays and moe is not None:
            shape = (*rows.tokens.shape, self._job.network.model.layers, moe.per_token)
            sharding = choice_sharding(self._batch_shardings)
            batch = RoutedBatch(rows, jax.ShapeDtypeStruct(shape, record_dtype(moe.count), sharding=sharding))
        return self._update.trace(self.trained.abstract_state(), batch, jax.ShapeDtypeStruct((), np.int32))

    def learn(
        self, state: TrainState, trajectories: Sequence[Trajectory], phases: Phases
    ) -> tuple[TrainState, Metrics]:
        """`epochs` passes over the step's mini-batches. π_old and π_ref are fixed before the first update.

        Metrics are means over the updates. Those that compare sampler and trainer are of the policy before any update:
        of all mini-batches where π_old is scored, of the first one otherwise.
        Raises: NumericFaultError as `Skips.note`.
        """
        algorithm = self._job.config.algorithm
        minis = mini_batches(trajectories, algorithm.mini_batches)
        packed = [self._pack(mini, self._keeps_all) for mini in minis]
        choices = [self._choices(mini, self._keeps_all) for mini in minis]
        batches = [
            (self._scored(state, batch, chosen, n_micro, phases), n_micro)
            for (batch, n_micro, _), chosen in zip(packed, choices, strict=True)
        ]
        if algorithm.normalizes_weights:
            batches = [(batch._replace(advantage=self._advantage(batch)), n_micro) for batch, n_micro in batches]
        rows: list[Metrics] = []
        scored = algorithm.old_logprobs == "trainer"
        measured = self._measured_mismatch([batch for batch, n_micro in batches if n_micro and scored])
        pack_all = lambda numbered: self._pack(numbered, keep_all=True)[0]
        whole = [
            routed(self._update.attach(mini, batch, pack_all), chosen)
            for mini, (batch, _), chosen in zip(minis, batches, choices, strict=True)
        ]
        with phases("update_actor"):
            for _ in range(algorithm.epochs):
                for (batch, n_micro), completed in zip(batches, whole, strict=True):
                    if n_micro == 0:  # no group has signal: even the optimizer's passes are saved
                        state = state._replace(step=state.step + 1)
                        continue
                    state, metrics, logp = self._update(state, completed, n_micro)
                    measured = measured or self._measured_mismatch([batch._replace(old_logp=logp)])
                    rows.append(floats(metrics))
                    self._skips.note(rows[-1]["actor/skipped_update"] > 0, state, completed, n_micro)
        reports = [report for *_, report in packed]
        return state, _summary(rows) | measured | {
            "training/trained_sequences": sum(report.sequences for report in reports),
            "training/row_occupancy": float(np.mean([report.occupancy for report in reports])),
            **seqlen_metrics([report.undealt for report in reports], [report.dealt for report in reports]),
            "training/micro_batches": sum(n_micro for _, n_micro in batches),
            "training/skipped_updates": sum(row["actor/skipped_update"] for row in rows),
        }

    def replay(self, folder: Path) -> tuple[Diagnosis, Metrics]:
        """A look into one update that `Skips` has kept, and the metrics that it gives. Raises: ValueError as
        `read_fault`."""
        rows = empty_batch(self.shape).tokens.shape
        fault = read_fault(folder, self.trained.abstract_state(), self._update.shardings, rows)
        found = diagnose(self._update.probe(), fault.state.params, fault.batch, fault.n_micro, *self._update.held)
        _, metrics, _ = self._update(fault.state, fault.batch, fault.n_micro)
        return found, floats(metrics)

    def old_logprobs(self, state: TrainState, trajectories: Sequence[Trajectory], phases: Phases) -> list[np.ndarray]:
        """log π_old of each sampled token, a float32 [n] for each trajectory, [0] for one that is not trained on.

        With old_logprobs=trainer it is scored here, and once more for the update.
        """
        if self._job.config.algorithm.old_logprobs == "sampler":
            return [t.logp[: len(t.response_ids) * t.train] for t in trajectories]
        with phases("old_log_prob"):
            return self._scored_tokens(state.params, trajectories, self._score_policy)

    def reference_logprobs(self, trajectories: Sequence[Trajectory], phases: Phases) -> list[np.ndarray]:
        """log π_ref of each sampled token, as `old_logprobs`."""
        with phases("ref"):
            return self._scored_tokens(self._reference, trajectories, self._score)

    def _scored_tokens(
        self, params: Params | None, trajectories: Sequence[Trajectory], score: Score
    ) -> list[np.ndarray]:
        found = []
        for mini in mini_batches(trajectories, self._job.config.algorithm.mini_batches):
            batch, n_micro, _ = self._pack(numbered(mini), keep_all=True)
            choices = self._choices(mini, keep_all=True) if score is self._score_policy else None
            logp_ABM = score(params, routed(place(batch, self._batch_shardings), choices), n_micro)
            found += by_number(fetch(logp_ABM), batch.advantage, len(mini))
        return found

    def _pack(self, trajectories: Sequence[Trajectory], keep_all: bool) -> tuple[TrainBatch, int, Any]:
        return pack_update(self._job, trajectories, self.shape, keep_all, self._lessons)

    @property
    def _keeps_all(self) -> bool:
        """Whether samples without advantage are in the rows too."""
        return self._job.config.algorithm.keeps_zero_advantage or self._job.config.model.moe.adds_loss

    def _choices(self, trajectories: Sequence[Trajectory], keep_all: bool) -> jax.Array | None:
        """The sampler's choices of experts at the positions of these trajectories' rows, where they are replayed."""
        if not self._replays:
            return None
        counted = zip(numbered(trajectories), trajectories, strict=True)
        kept = [one if keep_all or np.any(t.advantage) else t for one, t in counted]
        moe = self._job.network.model.moe
        assert moe is not None
        chosen = packed_choices(self._pack(kept, keep_all=False)[0], trajectories, moe.count)
        return place(chosen, choice_sharding(self._batch_shardings))

    def _scored(
        self, state: TrainState, batch: TrainBatch, choices: jax.Array | None, n_micro: int, phases: Phases
    ) -> TrainBatch:
        """The batch on the devices, with π_old by the trainer and π_ref by the reference where asked for."""
        placed = place(batch, self._batch_shardings)
        if self._job.config.algorithm.old_logprobs == "trainer":
            with phases("old_log_prob"):
                logp_ABM = self._score_policy(state.params, routed(placed, choices), n_micro)
                placed = placed._replace(old_logp=jax.block_until_ready(logp_ABM))
        if self._job.config.algorithm.kl_in_loss:
            with phases("ref"):
                placed = placed._replace(ref_logp=jax.block_until_ready(self._score(self._reference, placed, n_micro)))
        return placed

    def _measured_mismatch(self, batches: Sequence[TrainBatch]) -> Metrics:
        """All of `rollout_corr/*`, from batches whose π_old is the trainer's; means over them, none without any."""
        return mean_metrics([floats(self._sampler_metrics(batch)) for batch in batches])


def _summary(rows: Sequence[Metrics]) -> Metrics:
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row[name] for row in rows if name in row] for name in names}
    return {n: v[0] if n.startswith(FIRST_UPDATE) else float(np.mean(v)) for n, v in values.items()}
