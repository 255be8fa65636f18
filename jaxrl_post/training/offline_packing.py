"""From examples to the packed rows of one offline update; numpy on the host, shapes known before the first step.

Legend: A micro-batches, B rows, T token positions and M targets of a row, E examples of a row, K answers of an example,
N examples of an update.

An example is one block, never split over rows: its prompt once, then its answers, each a branch of it. So both sides of
a pair are in one micro-batch, and their log-probs share one forward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxrl_post.objectives.reductions import token_weights
from jaxrl_post.training.balance import places, rank_tokens
from jaxrl_post.training.packing import (
    POSITION_FIELDS,
    ROW_MULTIPLE,
    PackReport,
    PackShape,
    best_fit,
    empty_batch,
    evenly,
)
from jaxrl_post.types import TrainBatch
from jaxrl_post.types_offline import Example, ExampleFields, OfflineBatch
from sharding.placement import tree_shardings
from sharding.rules import TRAIN, Rules


@dataclasses.dataclass(frozen=True)
class ExampleShape:
    """Static shapes of an update: rows, and up to `examples` of them in a row with `answers` each."""

    rows: PackShape
    examples: int
    answers: int


class Weights(NamedTuple):
    """Shares of a mean, float32 [N] each: of every token of a first answer, of the example, and of it among those of
    its label."""

    token: np.ndarray
    example: np.ndarray
    label: np.ndarray

    def of(self, part: slice) -> Weights:
        return Weights(*(weight_N[part] for weight_N in self))


def example_shape(
    sizes: Sequence[int],
    answers: int,
    *,
    examples_per_step: int,
    tokens_per_microbatch: int,
    row_length: int | None = None,
    batch_shards: int = 1,
) -> ExampleShape:
    """Shapes that hold any `examples_per_step` examples of the given sizes (in columns), one program for all.

    Best fit opens a row only when no other has room for the block, so all rows but the last hold at least
    `length // largest` examples.
    Raises: ValueError when the largest example does not fit a row, or a row does not fit `tokens_per_microbatch`.
    """
    largest, smallest = max(sizes), min(sizes)
    rounded = math.ceil(largest / ROW_MULTIPLE) * ROW_MULTIPLE
    length = row_length or min(rounded, max(tokens_per_microbatch, largest))
    if not largest <= length <= tokens_per_microbatch:
        raise ValueError(
            f"the longest example takes {largest} positions of a row (a pair: its prompt and both answers), a row has "
            f"{length} and training.tokens_per_microbatch={tokens_per_microbatch}: raise training.row_length or that "
            "budget, or lower data.max_tokens"
        )
    rows_needed = math.ceil(examples_per_step / (length // largest))
    shape = evenly(rows_needed, length, tokens_per_microbatch, batch_shards)
    return ExampleShape(shape, min(examples_per_step, length // smallest), answers)


def example_weights(examples: Sequence[Example], aggregation: str = "token-mean") -> Weights:
    """Weights that make sums over the examples their means; `aggregation` is that of the tokens of first answers."""
    token_N = token_weights(np.array([e.answers[0].length for e in examples]), aggregation)
    label_N = label_shares(np.array([e.desirable for e in examples]))
    return Weights(token_N, np.full(len(examples), 1 / len(examples), np.float32), label_N)


def pack_examples(
    examples: Sequence[Example],
    shape: ExampleShape,
    weights: Weights | None = None,
    ref_logp: Sequence[np.ndarray] | None = None,
) -> tuple[OfflineBatch, int, PackReport]:
    """The rows of one update, how many leading micro-batches hold any, and a report.

    `weights` are `example_weights` of these examples, or those they have as part of more; `ref_logp` the reference's
    log-probs of each example's targets, where they are known.
    Raises: ValueError when examples do not fit `shape`.
    """
    weights = example_weights(examples) if weights is None else weights
    batch, rows = empty_examples(shape), layout(examples, shape)
    for (a, b), row in rows:
        view = OfflineBatch(
            TrainBatch(*(field[a, b] for field in batch.rows)),
            ExampleFields(*(field[a, b] for field in batch.examples)),
        )
        _write_row(view, [examples[i] for i in row], weights.token[row])
        view.examples.weight[: len(row)] = weights.example[row]
        view.examples.share[: len(row)] = weights.label[row]
        if ref_logp is not None:
            known = np.concatenate([ref_logp[i] for i in row])
            view.rows.ref_logp[: len(known)] = known
    n_micro = math.ceil(len(rows) / shape.rows.rows)
    positions = n_micro * shape.rows.rows * shape.rows.length
    occupancy = np.count_nonzero(batch.rows.segments) / positions
    targets = sum(example.targets for example in examples)
    tokens = [sum(examples[i].size for i in row) for _, row in rows]
    ranks = rank_tokens(
        [min(row) for _, row in rows], tokens, [at for at, _ in rows], shape.rows.rows, shape.rows.batch_shards
    )
    return batch, n_micro, PackReport(len(examples) * shape.answers, 0, len(rows), targets, occupancy, *ranks)


def unpack_targets(x_ABM: np.ndarray, examples: Sequence[Example], shape: ExampleShape) -> list[np.ndarray]:
    """The values at each example's targets, of an array made from `pack_examples` of the same examples."""
    parts: dict[int, np.ndarray] = {}
    for (a, b), row in layout(examples, shape):
        ends = np.cumsum([examples[i].targets for i in row])
        parts |= zip(row, np.split(x_ABM[a, b, : ends[-1]], ends[:-1]), strict=True)
    return [parts[i] for i in range(len(examples))]


def layout(examples: Sequence[Example], shape: ExampleShape) -> list[tuple[tuple[int, int], list[int]]]:
    """(micro-batch, row) and the examples of each row, in the order in which they and their targets stand there."""
    rows = best_fit([example.size for example in examples], shape.rows.length)
    if len(rows) > shape.rows.micro_batches * shape.rows.rows or max(map(len, rows)) > shape.examples:
        raise ValueError(f"{len(examples)} examples need {len(rows)} rows and do not fit {shape}: pack fewer")
    targets = [sum(examples[i].targets for i in row) for row in rows]
    tokens = [sum(examples[i].size for i in row) for row in rows]
    return list(zip(places(targets, tokens, shape.rows.rows, shape.rows.batch_shards), rows, strict=True))


def label_shares(desirable_N: np.ndarray) -> np.ndarray:
    """1 over the number of examples with the same label, float32 [N]."""
    good = int(desirable_N.sum())
    return np.where(desirable_N, 1 / max(good, 1), 1 / max(len(desirable_N) - good, 1)).astype(np.float32)


def empty_examples(shape: ExampleShape) -> OfflineBatch:
    """A batch of padding, all zeros; it has every field's shape and dtype."""
    outer = (shape.rows.micro_batches, shape.rows.rows)
    zeros = lambda width, dtype: np.zeros((*outer, width), dtype)
    E = shape.examples
    fields = ExampleFields(
        weight=zeros(E, np.float32),
        share=zeros(E, np.float32),
        desirable=zeros(E, np.bool_),
        margin=zeros(E, np.float32),
        last=zeros(E * shape.answers, np.int32),
    )
    return OfflineBatch(empty_batch(shape.rows), fields)


def example_shardings(shape: ExampleShape, mesh: Mesh, rules: Rules = TRAIN) -> OfflineBatch:
    """Rows over the batch axes, positions over `sequence`; all else whole. Raises: ValueError as `tree_shardings`."""
    widths = ("length" if name in POSITION_FIELDS else None for name in TrainBatch._fields)
    rows = TrainBatch(*((None, "batch", width) for width in widths))
    axes = OfflineBatch(rows, ExampleFields(*[(None, "batch", None)] * len(ExampleFields._fields)))
    return tree_shardings(axes, empty_examples(shape), rules, mesh)


def _write_row(row: OfflineBatch, examples: Sequence[Example], token_weight_E: np.ndarray) -> None:
    """Fills views of one row in place."""
    column = target = sequence = 0
    for e, example in enumerate(examples):
        row.examples.desirable[e], row.examples.margin[e] = example.desirable, example.margin
        trunk = len(example.prompt_ids)
        trunk_end = column + trunk
        _write_columns(row.rows, column, example.prompt_ids, 0, e + 1, 0)
        column = trunk_end
        for k, answer in enumerate(example.answers):
            _write_columns(row.rows, column, answer.ids, trunk, e + 1, k + 1)
            source = np.concatenate([[trunk_end - 1], np.arange(column, column + len(answer.ids) - 1)])
            weight = token_weight_E[e] if k == 0 else 0.0
            trained = np.array(answer.trained)
            target = _write_targets(row.rows, target, source[trained], np.array(answer.ids)[trained], sequence, weight)
            column += len(answer.ids)
            row.examples.last[sequence] = column - 1
            sequence += 1


def _write_columns(row: TrainBatch, start: int, ids: Sequence[int], position: int, segment: int, branch: int) -> None:
    columns = slice(start, start + len(ids))
    row.tokens[columns] = ids
    row.positions[columns] = np.arange(position, position + len(ids))
    row.segments[columns] = segment
    row.branches[columns] = branch


def _write_targets(
    row: TrainBatch, start: int, source: np.ndarray, ids: np.ndarray, sequence: int, weight: float
) -> int:
    live = slice(start, start + len(ids))
    row.source[live], row.target[live] = source, ids
    row.sequence[live], row.mask[live], row.weight[live] = sequence, True, weight
    return live.stop
