"""The learning half of an offline step: from examples to new parameters, one update a step.

Legend: A micro-batches, B rows, M targets of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Traced

from jaxrl_post.config_offline import KTO, FineTuning, SFTDistillation
from jaxrl_post.config_teachers import Taught
from jaxrl_post.data.preferences import mismatched
from jaxrl_post.loops.faulty_update import Skips, read_fault
from jaxrl_post.loops.measures import Metrics, floats
from jaxrl_post.loops.network import check_row
from jaxrl_post.loops.offline_job import OfflineJob
from jaxrl_post.loops.teachers import NO_TEACHERS, Teachers
from jaxrl_post.loops.trained import make_trained
from jaxrl_post.models.decoder import Params
from jaxrl_post.observe.progress import Phases
from jaxrl_post.training.balance import seqlen_metrics
from jaxrl_post.training.diagnosis import Diagnosis, diagnose, make_probe
from jaxrl_post.training.distillation_loss import taught_forward
from jaxrl_post.training.log_ratios import mean_ratio, reference_point
from jaxrl_post.training.offline_packing import (
    ExampleShape,
    Weights,
    empty_examples,
    example_shape,
    example_shardings,
    example_weights,
    pack_examples,
    unpack_targets,
)
from jaxrl_post.training.offline_update import (
    Forward,
    language_model,
    make_evaluate,
    make_forward,
    make_offline_update,
    offline_micro_loss,
    reward_model,
)
from jaxrl_post.training.packing import PackReport
from jaxrl_post.training.preference_loss import needs_reference, needs_shift, offline_loss, reward_scale
from jaxrl_post.training.state import TrainState
from jaxrl_post.training.teacher_view import example_view, view_shardings
from jaxrl_post.training.update import row_placement
from jaxrl_post.types import TaughtBatch
from jaxrl_post.types_offline import Example, OfflineBatch, TaughtExamples
from sharding.mesh import batch_shards
from sharding.placement import place, placed_shapes, reshard
from sharding.processes import fetch

CORE = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "accuracy": "accuracy",
    "rewards/margins": "margin",
    "margin": "margin",
}


class OfflineLearner:
    """The compiled update of a run, the frozen reference where the loss has one, and BCO's running mean."""

    def __init__(self, job: OfflineJob, teachers: Teachers = NO_TEACHERS):
        config, network = job.config, job.network
        self._teachers = teachers
        self._job, self._algorithm = job, config.algorithm
        self.trained = make_trained(network, config.optimizer, config.steps)
        shardings = self.trained.shardings
        self.shape = _shape(job)
        teachers.check_row(self.shape.rows.length)
        self._batch_shardings: Any = example_shardings(self.shape, network.mesh)
        if teachers.shardings:
            self._batch_shardings = TaughtExamples(
                *self._batch_shardings, view=view_shardings(self._batch_shardings.rows)
            )
        self._made = forward, loss = self._forward(), offline_loss(self._algorithm)
        placed = {"batch_shardings": self._batch_shardings, "constant_shardings": teachers.shardings or None}
        optimizer = self.trained.optimizer
        self._update: Any = make_offline_update(forward, optimizer, loss, shardings=shardings, **placed)
        self._evaluate = make_evaluate(forward, loss, params_shardings=shardings.params, **placed)
        self._score = make_forward(forward, params_shardings=shardings.params, batch_shardings=self._batch_shardings)
        self._reference: Params | None = None
        self._scores: dict[Example, np.ndarray] = {}
        self._shift = {"updates": 0, "mean": 0.0}
        self._skips = Skips(config)

    def _forward(self) -> Forward:
        """What the loss reads: scores of a reward model, or log-probs, with divergences to teachers where there are."""
        network, rows, chunk = self._job.network, self._batch_shardings.rows, self._job.config.training.logprob_chunk
        if network.has_head:
            return reward_model(network.graphdef, self._batch_shardings)
        if not isinstance(self._algorithm, SFTDistillation):
            return language_model(network.graphdef, self._batch_shardings, chunk)
        graphdefs, place_rows = self._teachers.graphdefs, row_placement(rows)
        taught = taught_forward(
            network.graphdef, graphdefs, self._algorithm, temperature=1.0, chunk=chunk, place=place_rows
        )

        def forward(params: Params, micro: Any, weights: Any) -> Any:
            return taught(params, weights, TaughtBatch(micro.rows, micro.view))

        return forward

    @property
    def needs_reference(self) -> bool:
        return needs_reference(self._algorithm)

    def keep_reference(self, params: Params) -> None:
        """Hold a copy of `params` (training layout) as π_ref."""
        self._reference = reshard(params, self.trained.shardings.params)

    def score(self, params: Params, examples: Sequence[Example]) -> list[np.ndarray]:
        """Log-probs of each example's targets, float32; as many examples as an update has at most."""
        batch, n_micro, _ = self._packed(examples)
        return unpack_targets(fetch(self._score(params, batch, n_micro)), examples, self.shape)

    def keep_scores(self, scores: dict[Example, np.ndarray]) -> None:
        """What `score` gives for π_ref on every example there is, in place of a copy of its weights."""
        self._scores = scores

    def traced_update(self) -> Traced:
        """The update from abstract arguments; nothing is allocated on a device. Raises: ValueError with teachers."""
        if isinstance(self._algorithm, Taught):
            raise ValueError(f"algorithm.kind={self._algorithm.kind}: its update, with teachers, cannot be planned yet")
        batch = placed_shapes(empty_examples(self.shape), self._batch_shardings)
        constant, n_micro = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.int32)
        return self._update.trace(self.trained.abstract_state(), batch, constant, n_micro)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the arrays, for JSON."""
        return {"shift": dict(self._shift)}

    def restore(self, host: dict[str, Any]) -> None:
        self._shift = dict(host["shift"])

    def learn(self, state: TrainState, examples: Sequence[Example], phases: Phases) -> tuple[TrainState, Metrics]:
        """One optimizer update on the examples. Raises: NumericFaultError as `Skips.note`."""
        batch, n_micro, report = self._packed(examples)
        batch = self._referenced(batch, n_micro, phases)
        constant, known = self._constant(state, examples, batch, n_micro, phases)
        with phases("update_actor"):
            state, measured = self._update(state, batch, constant, n_micro)
            metrics = floats(measured)
        number = None if self._teachers.params else float(constant)
        self._skips.note(metrics["actor/skipped_update"] > 0, state, batch, n_micro, number)
        return state, self._of_labels(metrics, examples) | known | {
            "training/trained_sequences": report.sequences,
            "training/trained_tokens": report.targets,
            "training/row_occupancy": report.occupancy,
            "training/micro_batches": n_micro,
            **seqlen_metrics([report.undealt], [report.dealt]),
            "perf/total_num_tokens": sum(example.size for example in examples),
        }

    def replay(self, folder: Path) -> tuple[Diagnosis, Metrics]:
        """A look into one update that `Skips` has kept, and the metrics that it gives. Raises: ValueError as
        `read_fault`."""
        rows = empty_examples(self.shape).rows.tokens.shape
        fault = read_fault(folder, self.trained.abstract_state(), self._batch_shardings, rows)
        constant: Any = np.float32(fault.constant) if fault.constant is not None else self._teachers.params
        probe = make_probe(offline_micro_loss(*self._made), self.trained.shardings.params)
        found = diagnose(probe, fault.state.params, fault.batch, fault.n_micro, constant)
        _, measured = self._update(fault.state, fault.batch, constant, fault.n_micro)
        return found, floats(measured)

    def evaluate(self, params: Params, examples: Sequence[Example], phases: Phases) -> Metrics:
        """The loss and its metrics as means over all the examples, nothing learned: `val-core/{loss, accuracy, margin}`
        where the loss has them, `val-aux/…` for the others.

        KTO's reference point is that of all the examples together; BCO's shift is the one training has come to.
        """
        constant: Any = self._teachers.params or np.float32(self._shift["mean"])
        if isinstance(self._algorithm, KTO):
            others = list(self._parts(mismatched(examples, self._job.config.data.max_tokens), phases))
            scores = [self._score(params, batch, n_micro) for batch, n_micro in others]
            joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(batch for batch, _ in others))
            constant = reference_point(jnp.concatenate(scores), joined)
        parts = (self._evaluate(params, batch, constant, n_micro) for batch, n_micro in self._parts(examples, phases))
        measured = fetch(list(parts))
        metrics = {name: sum(float(part[name]) for part in measured) for name in measured[0]}
        metrics = self._of_labels(metrics, examples)
        return {f"val-core/{CORE[x]}" if x in CORE else f"val-aux/{x}": value for x, value in metrics.items()}

    def _parts(self, examples: Sequence[Example], phases: Phases) -> Iterator[tuple[OfflineBatch, int]]:
        """The examples in batches the size of an update's, weighed as parts of one whole."""
        weights, size = self._weights(examples), self._job.config.data.examples_per_step
        for start in range(0, len(examples), size):
            part = slice(start, start + size)
            batch, n_micro, _ = self._packed(examples[part], weights.of(part))
            yield self._referenced(batch, n_micro, phases), n_micro

    def _of_labels(self, metrics: Metrics, examples: Sequence[Example]) -> Metrics:
        """Without KTO's means over answers of a label where only the other one is there."""
        if not isinstance(self._algorithm, KTO) or len({example.desirable for example in examples}) == 2:
            return metrics
        return {name: value for name, value in metrics.items() if "/" not in name or name.startswith("actor/")}

    def _weights(self, examples: Sequence[Example]) -> Weights:
        aggregation = self._algorithm.aggregation if isinstance(self._algorithm, FineTuning) else "token-mean"
        return example_weights(examples, aggregation)

    def _packed(self, examples: Sequence[Example], weights: Weights | None = None) -> tuple[Any, int, PackReport]:
        known = [self._scores[example] for example in examples] if self._scores else None
        packed, n_micro, report = pack_examples(examples, self.shape, weights or self._weights(examples), known)
        batch: OfflineBatch | TaughtExamples = packed
        if self._teachers.shardings:
            batch = TaughtExamples(*packed, view=example_view(packed.rows, examples, self.shape))
        return place(batch, self._batch_shardings), n_micro, report

    def _referenced(self, batch: OfflineBatch, n_micro: int, phases: Phases) -> OfflineBatch:
        if self._reference is None:
            return batch
        with phases("ref"):
            ref_logp = jax.block_until_ready(self._score(self._reference, batch, n_micro))
        return batch._replace(rows=batch.rows._replace(ref_logp=ref_logp))

    def _constant(
        self, state: TrainState, examples: Sequence[Example], batch: OfflineBatch, n_micro: int, phases: Phases
    ) -> tuple[Any, Metrics]:
        """KTO's reference point or BCO's shift, under the policy before the update; teachers' weights; else 0."""
        if isinstance(self._algorithm, KTO):
            with phases("reference_point"):
                others, count, _ = self._packed(mismatched(examples, self._job.config.data.max_tokens))
                others = self._referenced(others, count, phases)
                point = reference_point(self._score(state.params, others, count), others)
                return point, {"kl": float(point)}
        if needs_shift(self._algorithm):
            with phases("reference_point"):
                ratio = float(mean_ratio(self._score(state.params, batch, n_micro), batch))
            n, mean = self._shift["updates"], self._shift["mean"]
            self._shift = {"updates": n + 1, "mean": mean + (reward_scale(self._algorithm) * ratio - mean) / (n + 1)}
            return np.float32(self._shift["mean"]), {"rewards/shift": self._shift["mean"]}
        return self._teachers.params or np.float32(0), {}


def _shape(job: OfflineJob) -> ExampleShape:
    config, examples = job.config, (*job.examples, *job.held_out)
    sizes = [example.size for example in examples]
    if config.algorithm.kind == "kto":  # prompts are also paired with each other's answers
        prompts = [len(example.prompt_ids) for example in examples]
        answers = [len(example.answers[0].ids) for example in examples]
        sizes = [min(prompts) + 1, min(max(prompts) + max(answers), config.data.max_tokens)]
    shape = example_shape(
        sizes,
        len(job.examples[0].answers),
        examples_per_step=config.data.examples_per_step,
        tokens_per_microbatch=config.training.tokens_per_microbatch,
        row_length=config.training.row_length,
        batch_shards=batch_shards(job.network.mesh),
    )
    check_row(job.network, shape.rows.length)
    return shape
