"""The learning half of a step: from trajectories to new parameters, over epochs and mini-batches.

P prompts a step, G samples each; A micro-batches, B rows, M targets of an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_post.loops.job import Job
from jaxrl_post.models.decoder import Params
from jaxrl_post.observe.progress import Phases
from jaxrl_post.training.loss import grpo_loss
from jaxrl_post.training.optimizer import make_optimizer
from jaxrl_post.training.packing import PackShape, pack, pack_shape
from jaxrl_post.training.state import TrainState, abstract_state, init_state, state_shardings
from jaxrl_post.training.update import batch_shardings, make_score, make_update
from jaxrl_post.types import TrainBatch, Trajectory
from sharding.mesh import batch_shards
from sharding.placement import place, reshard

Metrics = dict[str, float]
FIRST_UPDATE = ("training/rollout_probs_diff", "rollout_corr/")  # sampler against trainer: before the policy moves


class Learner:
    """The compiled update and scoring programs of a run, and the frozen reference policy where a KL asks for one."""

    def __init__(self, job: Job, reference: Params | None = None):
        """`reference` are initial parameters in the training layout, needed with `algorithm.kl.coef` > 0; copied."""
        config, algorithm = job.config, job.config.algorithm
        self._job = job
        self._optimizer = make_optimizer(config.optimizer, config.steps, algorithm.epochs * algorithm.mini_batches)
        self._shardings = state_shardings(job.abstract_params, job.axes, self._optimizer, job.mesh)
        self.shape = _shape(job)
        self._batch_shardings = batch_shardings(self.shape, job.mesh)
        temperature, chunk = config.rollout.temperature, config.training.logprob_chunk
        self._update = make_update(
            job.graphdef,
            self._optimizer,
            grpo_loss(algorithm),
            shardings=self._shardings,
            batch_shardings=self._batch_shardings,
            temperature=temperature,
            chunk=chunk,
        )
        self._score = make_score(
            job.graphdef,
            params_shardings=self._shardings.params,
            batch_shardings=self._batch_shardings,
            temperature=temperature,
            chunk=chunk,
        )
        self._reference = reshard(reference, self._shardings.params) if algorithm.kl.coef and reference else None

    def start(self, params: Params) -> TrainState:
        """Fresh optimizer state around `params`, which it takes over (the first update donates them)."""
        return init_state(params, self._optimizer, self._shardings)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state: what to restore a checkpoint into."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract_state(self._job.abstract_params, self._optimizer),
            self._shardings,
        )

    def learn(
        self, state: TrainState, trajectories: Sequence[Trajectory], phases: Phases
    ) -> tuple[TrainState, Metrics]:
        """`epochs` passes over the step's mini-batches. π_old and π_ref are fixed before the first update.

        Metrics are means over the updates, those that compare sampler and trainer are the first update's.
        """
        packed = [self._pack(mini) for mini in self._mini_batches(trajectories)]
        batches = [(self._scored(state, batch, n_micro, phases), n_micro) for batch, n_micro, _ in packed]
        rows: list[Metrics] = []
        with phases("update_actor"):
            for _ in range(self._job.config.algorithm.epochs):
                for batch, n_micro in batches:
                    if n_micro == 0:  # no group has signal: even the optimizer's passes are saved
                        state = state._replace(step=state.step + 1)
                        continue
                    state, metrics = self._update(state, batch, n_micro)
                    rows.append({name: float(value) for name, value in jax.device_get(metrics).items()})
        reports = [report for *_, report in packed]
        return state, _summary(rows) | {
            "training/trained_sequences": sum(report.sequences for report in reports),
            "training/row_occupancy": float(np.mean([report.occupancy for report in reports])),
            "training/micro_batches": sum(n_micro for _, n_micro in batches),
        }

    def _mini_batches(self, trajectories: Sequence[Trajectory]) -> list[Sequence[Trajectory]]:
        """Whole groups, in order."""
        size = len(trajectories) // self._job.config.algorithm.mini_batches
        return [trajectories[i : i + size] for i in range(0, len(trajectories), size)]

    def _pack(self, trajectories: Sequence[Trajectory]) -> tuple[TrainBatch, int, Any]:
        config = self._job.config
        return pack(
            trajectories,
            self.shape,
            aggregation=config.algorithm.aggregation,
            scale_length=config.algorithm.loss_scale_length or config.rollout.max_new_tokens,
            share_prefix=config.training.share_prefix,
            keep_all=config.algorithm.kl.coef > 0,
        )

    def _scored(self, state: TrainState, batch: TrainBatch, n_micro: int, phases: Phases) -> TrainBatch:
        """The batch on the devices, with π_old by the trainer and π_ref by the reference where asked for."""
        placed = place(batch, self._batch_shardings)
        if self._job.config.algorithm.old_logprobs == "trainer":
            with phases("old_log_prob"):
                placed = placed._replace(old_logp=jax.block_until_ready(self._score(state.params, placed, n_micro)))
        if self._reference is not None:
            with phases("ref"):
                placed = placed._replace(ref_logp=jax.block_until_ready(self._score(self._reference, placed, n_micro)))
        return placed


def _shape(job: Job) -> PackShape:
    config = job.config
    return pack_shape(
        max_prompt=job.prompt_width,
        max_new_tokens=config.rollout.max_new_tokens,
        samples_per_prompt=config.rollout.samples_per_prompt,
        prompts=config.data.prompts_per_step // config.algorithm.mini_batches,
        tokens_per_microbatch=config.training.tokens_per_microbatch,
        row_length=config.training.row_length,
        share_prefix=config.training.share_prefix,
        batch_shards=batch_shards(job.mesh),
    )


def _summary(rows: Sequence[Metrics]) -> Metrics:
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row[name] for row in rows if name in row] for name in names}
    return {n: v[0] if n.startswith(FIRST_UPDATE) else float(np.mean(v)) for n, v in values.items()}
