"""The learning half of a step: from trajectories to new parameters, over epochs and mini-batches.

P prompts a step, G samples each; A micro-batches, B rows, M targets of an update.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.stages import Traced

from jaxrl_post.config_distillation import Distillation
from jaxrl_post.loops.faulty_update import Skips, read_fault
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.network import check_row
from jaxrl_post.loops.taught_update import TaughtUpdate, numbered
from jaxrl_post.loops.teachers import NO_TEACHERS, Teachers
from jaxrl_post.models import backends
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Params
from jaxrl_post.models.moe import record_dtype
from jaxrl_post.observe.progress import Phases
from jaxrl_post.training.balance import seqlen_metrics
from jaxrl_post.training.diagnosis import Diagnosis, diagnose, make_probe
from jaxrl_post.training.loss import policy_loss
from jaxrl_post.training.optimizer import make_optimizer
from jaxrl_post.training.packing import LONGEST_GROUP_ROW, PackReport, PackShape, empty_batch, pack, pack_shape
from jaxrl_post.training.routing import choice_sharding, packed_choices, routed
from jaxrl_post.training.state import TrainState, abstract_gradients, init_state, restorable_state, state_shardings
from jaxrl_post.training.surrogate import sampler_metrics, weighed_advantage
from jaxrl_post.training.update import Rows, Score, batch_shardings, make_score, make_update, micro_batch_loss
from jaxrl_post.types import RoutedBatch, TrainBatch, Trajectory
from sharding.mesh import batch_shards
from sharding.placement import place, placed_shapes, reshard
from sharding.processes import fetch

Metrics = dict[str, float]
FIRST_UPDATE = ("training/rollout_probs_diff", "rollout_corr/")  # sampler against trainer: before the policy moves


class Learner:
    """The compiled update and scoring programs of a run, and the frozen reference policy where a KL asks for one."""

    def __init__(self, job: Job, teachers: Teachers = NO_TEACHERS):
        """Holds no weights yet. Raises: ValueError when a custom loss cannot be had."""
        config, algorithm = job.config, job.config.algorithm
        self._job = job
        self._optimizer = make_optimizer(config.optimizer, config.steps, algorithm.epochs * algorithm.mini_batches)
        self._shardings = state_shardings(
            job.network.abstract_params,
            job.network.axes,
            self._optimizer,
            job.network.mesh,
            job.network.stage,
            config.optimizer.offload,
        )
        self._lessons = isinstance(algorithm, Distillation)  # teachers' prompts lie in the same rows
        self.shape = update_shape(job, config.rollout.max_new_tokens, self._lessons)
        self._batch_shardings: TrainBatch = batch_shardings(self.shape, job.network.mesh)
        self._replays = config.model.moe.routing_replay
        self._read: Rows = self._batch_shardings  # by the update
        if self._replays:
            self._read = RoutedBatch(self._batch_shardings, choice_sharding(self._batch_shardings))
        num_sequences = _num_sequences(job, self.shape)
        temperature, chunk = config.rollout.temperature, config.training.logprob_chunk
        self._update: Any  # (state, batch, n_micro) -> state, metrics, log-probs
        # (trajectories, their batch) -> what the update reads
        self._complete: Callable[[Sequence[Trajectory], TrainBatch], Any]
        if isinstance(algorithm, Distillation):
            taught = TaughtUpdate(job, algorithm, teachers, self.shape, self._optimizer, self._shardings)
            pack_all = lambda numbered: self._pack(numbered, keep_all=True)[0]
            self._update, self._complete = taught, functools.partial(taught.attach, pack=pack_all)
        else:
            self._update = make_update(
                job.network.graphdef,
                self._optimizer,
                policy_loss(algorithm, num_sequences),
                shardings=self._shardings,
                **self._policy_options(),
            )
            self._complete = lambda _, batch: batch
        score = functools.partial(
            make_score,
            job.network.graphdef,
            params_shardings=self._shardings.params,
            temperature=temperature,
            chunk=chunk,
        )
        self._score = score(batch_shardings=self._batch_shardings)
        self._score_policy = score(batch_shardings=self._read) if self._replays else self._score
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
            self._reference = reshard(params, self._shardings.params)

    def start(self, params: Params) -> TrainState:
        """Fresh optimizer state around `params`, which it takes over (the first update donates them)."""
        return init_state(params, self._optimizer, self._shardings)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state: what to restore a checkpoint into."""
        return restorable_state(self._job.network.abstract_params, self._optimizer, self._shardings)

    def abstract_gradients(self) -> Params:
        """Shapes and shardings of what an update adds up."""
        return abstract_gradients(self._job.network.abstract_params, self._shardings)

    def traced_update(self) -> Traced:
        """The update from abstract arguments; nothing is allocated on a device. Raises: ValueError for a student's."""
        if self._lessons:
            raise ValueError("algorithm.kind=distillation: its update, with teachers, cannot be planned yet")
        rows: TrainBatch = placed_shapes(empty_batch(self.shape), self._batch_shardings)
        batch: Rows = rows
        moe = self._job.network.model.moe
        if self._replays and moe is not None:
            shape = (*rows.tokens.shape, self._job.network.model.layers, moe.per_token)
            sharding = choice_sharding(self._batch_shardings)
            batch = RoutedBatch(rows, jax.ShapeDtypeStruct(shape, record_dtype(moe.count), sharding=sharding))
        return self._update.trace(self.abstract_state(), batch, jax.ShapeDtypeStruct((), np.int32))

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
        whole = [
            routed(self._complete(mini, batch), chosen)
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
        batches: Any
        if isinstance(self._update, TaughtUpdate):
            batches, probe, held = self._update.shardings, self._update.probe(), self._update.held
        else:
            token_loss = policy_loss(self._job.config.algorithm, _num_sequences(self._job, self.shape))
            micro_loss, survey = micro_batch_loss(self._job.network.graphdef, token_loss, **self._policy_options())
            batches, probe, held = self._read, make_probe(micro_loss, self._shardings.params, survey), ()
        fault = read_fault(folder, self.abstract_state(), batches, rows)
        found = diagnose(probe, fault.state.params, fault.batch, fault.n_micro, *held)
        _, metrics, _ = self._update(fault.state, fault.batch, fault.n_micro)
        return found, floats(metrics)

    def _policy_options(self) -> dict[str, Any]:
        """Of `micro_batch_loss`."""
        config = self._job.config
        return {
            "temperature": config.rollout.temperature,
            "chunk": config.training.logprob_chunk,
            "batch_shardings": self._read,
            "entropy_gradient": config.algorithm.entropy_coef > 0,
            "mixture": config.model.moe if self._job.network.model.moe else None,
        }

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


def mini_batches(trajectories: Sequence[Trajectory], count: int) -> list[Sequence[Trajectory]]:
    """Whole groups, in order."""
    size = len(trajectories) // count
    return [trajectories[i : i + size] for i in range(0, len(trajectories), size)]


def pack_update(
    job: Job, trajectories: Sequence[Trajectory], shape: PackShape, keep_all: bool, lessons: bool = False
) -> tuple[TrainBatch, int, PackReport]:
    """`training.packing.pack` as the recipe wants it."""
    algorithm, config = job.config.algorithm, job.config
    return pack(
        trajectories,
        shape,
        aggregation=algorithm.aggregation,
        scale_length=algorithm.loss_scale_length or config.rollout.max_new_tokens,
        share_prefix=config.training.share_prefix,
        keep_all=keep_all,
        lessons=lessons,
    )


def update_shape(job: Job, max_new_tokens: int, lessons: bool = False) -> PackShape:
    """Of an optimizer update on responses of up to so many tokens, after the students' prompts or the teachers' too.

    Raises: ValueError as `pack_shape`, and for rows that `mesh.sequence` does not cut.
    """
    config, model = job.config, job.network.model
    shape = pack_shape(
        max_prompt=job.lesson_width if lessons else job.prompt_width,
        max_new_tokens=max_new_tokens,
        samples_per_prompt=config.rollout.samples_per_prompt,
        prompts=config.data.prompts_per_step // config.algorithm.mini_batches,
        tokens_per_microbatch=config.training.tokens_per_microbatch,
        row_length=config.training.row_length,
        share_prefix=config.training.share_prefix,
        batch_shards=batch_shards(job.network.mesh),
        attention_length=attention_length(model),
        longest_group_row=_longest_group_row(model),
    )
    check_row(job.network, shape.length)
    return shape


def _longest_group_row(model: ModelConfig) -> float:
    """Kernels leave out what samples do not see of each other, so rows may be as long as they like."""
    return backends.longest_row(model) if model.attention == "flash" else LONGEST_GROUP_ROW


def attention_length(model: ModelConfig) -> float:
    """The row length at which attention takes as long as a layer's products.

    By operations it is (layer's weights) / (2 · heads · head width). Attention runs over whole masked rows at a quarter
    of the products' speed: measured on CPUs with 5M and 135M parameters (benchmarks/README.md).
    """
    if model.attention == "flash":
        return math.inf  # what a token does not see, the other samples of its group, is not computed
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    weights = model.hidden_size * (2 * queries + 2 * keys + 3 * model.active_width)
    return weights / (2 * queries) / 4


def by_number(values_ABM: np.ndarray, numbers_ABM: np.ndarray, count: int) -> list[np.ndarray]:
    """The values at numbers 1…count, in order; a number's targets lie in one row, in time order."""
    numbers = numbers_ABM.ravel()
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], np.arange(count + 1), side="right")
    return np.split(values_ABM.ravel()[order], ends)[1:-1]


def _num_sequences(job: Job, shape: PackShape) -> int:
    """The most sequences a row can hold: each has a token, and an update has so many."""
    samples = job.config.data.prompts_per_step * job.config.rollout.samples_per_prompt
    return min(shape.targets, samples // job.config.algorithm.mini_batches)


def floats(metrics: Mapping[str, Any]) -> Metrics:
    return {name: float(value) for name, value in fetch(metrics).items()}


def mean_metrics(rows: Sequence[Metrics]) -> Metrics:
    return {name: float(np.mean([row[name] for row in rows])) for name in (rows[0] if rows else {})}


def _summary(rows: Sequence[Metrics]) -> Metrics:
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row[name] for row in rows if name in row] for name in names}
    return {n: v[0] if n.startswith(FIRST_UPDATE) else float(np.mean(v)) for n, v in values.items()}
