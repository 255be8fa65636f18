"""From trajectories to the packed rows of one optimizer update; numpy on the host, shapes known before any data.

Legend: A micro-batches, B rows of a micro-batch, T token positions and M target tokens of a row, N trajectories.

A row is filled with blocks, as large as their prompt and responses together in tokens (`packed_row`), so one capacity,
T, bounds columns and targets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_post.objectives.reductions import token_weights
from jaxrl_post.training.balance import places, rank_tokens
from jaxrl_post.training.packed_row import Block, write_row
from jaxrl_post.types import TrainBatch, Trajectory

ROW_MULTIPLE = 32
LONGEST_GROUP_ROW = 1024  # where attention is quadratic in the row, larger groups are split over rows
POSITION_FIELDS = ("tokens", "positions", "segments", "branches")
FIELD_DTYPES = dict.fromkeys((*POSITION_FIELDS, "source", "target", "sequence"), np.int32) | {"mask": np.bool_}


@dataclasses.dataclass(frozen=True)
class PackShape:
    """Static shapes of one optimizer update: up to `micro_batches` of `rows` × `length` positions and `targets`.

    `rows` are cut over `batch_shards` devices.
    """

    rows: int
    length: int
    targets: int
    micro_batches: int
    batch_shards: int = 1


class PackReport(NamedTuple):
    """What `pack` did: sequences put into rows and left out, rows, target tokens, share of positions that are live;
    and tokens of each data rank if rows were cut over them in the trajectories' order, and as they are."""

    sequences: int
    left_out: int
    rows: int
    targets: int
    occupancy: float
    undealt: tuple[int, ...] = ()
    dealt: tuple[int, ...] = ()


def pack_shape(
    *,
    max_prompt: int,
    max_new_tokens: int,
    samples_per_prompt: int,
    prompts: int,
    tokens_per_microbatch: int,
    row_length: int | None = None,
    share_prefix: bool = True,
    batch_shards: int = 1,
    attention_length: float = math.inf,
    longest_group_row: float = LONGEST_GROUP_ROW,
) -> PackShape:
    """Shapes from configuration alone, so that one program serves every update and no data can exceed them.

    `prompts` are those of one optimizer update, `tokens_per_microbatch` is per device. A null `row_length` becomes a
    multiple of 32 (or `tokens_per_microbatch`, if less) that holds as many samples of a group as is cheapest: more of
    them share a prompt, and each attends over a longer row, of at most `longest_group_row` if it holds several.
    `attention_length` is the row length at which attention costs as much as the rest of the model. `micro_batches` is
    enough for full-length samples however they fall: best fit opens a row only when all others are too full for the
    block.

    Raises: ValueError when one sample does not fit a row or a row does not fit `tokens_per_microbatch`.
    """
    group, groups = (samples_per_prompt, prompts) if share_prefix else (1, prompts * samples_per_prompt)
    sample, whole = max_prompt + max_new_tokens, max_prompt + group * max_new_tokens
    most = min(tokens_per_microbatch, longest_group_row)
    length = row_length or _row_length(max_prompt, max_new_tokens, group, tokens_per_microbatch, most, attention_length)
    if not sample <= length <= tokens_per_microbatch:
        raise ValueError(
            f"a row of {length} positions must hold max_prompt_tokens + max_new_tokens = {sample} and fit "
            f"training.tokens_per_microbatch={tokens_per_microbatch}: change training.row_length or that budget"
        )
    block_samples = min(group, (length - max_prompt) // max_new_tokens)
    rows_needed = math.ceil(groups * math.ceil(group / block_samples) / (length // min(whole, length)))
    return evenly(rows_needed, length, tokens_per_microbatch, batch_shards)


def evenly(rows_needed: int, length: int, tokens_per_microbatch: int, batch_shards: int) -> PackShape:
    """As few micro-batches as hold so many rows, and no more rows in each than that takes."""
    micro_batches = math.ceil(rows_needed / (tokens_per_microbatch // length * batch_shards))
    rows = math.ceil(rows_needed / (micro_batches * batch_shards)) * batch_shards
    return PackShape(rows, length, length, micro_batches, batch_shards)


def pack(
    trajectories: Sequence[Trajectory],
    shape: PackShape,
    *,
    aggregation: str,
    scale_length: float | None = None,
    share_prefix: bool = True,
    keep_all: bool = False,
    lessons: bool = False,
) -> tuple[TrainBatch, int, PackReport]:
    """The rows of one optimizer update, how many leading micro-batches hold any (0: nothing to learn), and a report.

    Weights come from the token counts of every trajectory with `train`; of these, trajectories with advantage 0 are
    left out of the rows, as their loss and gradient are 0, unless `keep_all` (they matter once there is a KL loss).
    With `lessons` a row has room for the prompts that teachers see, too.
    `old_logp` and `rollout_logp` are the sampler's log-probs, `ref_logp` is 0. Rows with similar numbers of targets
    go into the same micro-batch, and every shard gets about as many tokens (`balance.places`).

    Raises: ValueError when a trajectory has no prompt, does not fit a row, or all do not fit `shape`; or as
    `objectives.reductions.token_weights`.
    """
    lengths_N = np.array([len(t.response_ids) if t.train else 0 for t in trajectories])
    weights_N = token_weights(lengths_N, aggregation, scale_length)
    kept = [i for i, t in enumerate(trajectories) if lengths_N[i] and (keep_all or np.any(t.advantage))]
    blocks = _blocks(trajectories, kept, shape.length, share_prefix, lessons)
    rows = [[blocks[b] for b in row] for row in best_fit([block.size for block in blocks], shape.length)]
    if len(rows) > shape.micro_batches * shape.rows:
        raise ValueError(
            f"{len(kept)} sequences need {len(rows)} rows, {shape} has {shape.micro_batches * shape.rows}: "
            "pack fewer prompts into one update or raise `prompts` of pack_shape"
        )
    targets = [sum(int(lengths_N[i]) for block in row for i in block.members) for row in rows]
    batch = empty_batch(shape)
    tokens = [sum(block.size for block in row) for row in rows]
    placed = places(targets, tokens, shape.rows, shape.batch_shards)
    for (a, b), row in zip(placed, rows, strict=True):
        write_row(TrainBatch(*(field[a, b] for field in batch)), row, trajectories, weights_N)
    n_micro = math.ceil(len(rows) / shape.rows)
    positions = max(n_micro * shape.rows * shape.length, 1)
    occupancy = np.count_nonzero(batch.segments) / positions
    first = [min(i for block in row for i in block.members) for row in rows]
    left_out, ranks = len(trajectories) - len(kept), rank_tokens(first, tokens, placed, shape.rows, shape.batch_shards)
    return batch, n_micro, PackReport(len(kept), left_out, len(rows), sum(targets), occupancy, *ranks)


def empty_batch(shape: PackShape) -> TrainBatch:
    """A batch of padding, all zeros; it has every field's shape and dtype."""
    widths = (shape.length if name in POSITION_FIELDS else shape.targets for name in TrainBatch._fields)
    dtypes = (FIELD_DTYPES.get(name, np.float32) for name in TrainBatch._fields)
    outer = (shape.micro_batches, shape.rows)
    return TrainBatch(*(np.zeros((*outer, width), dtype) for width, dtype in zip(widths, dtypes, strict=True)))


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes` in bins: largest first, each into the fullest bin that has room (best-fit decreasing)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [b for b, free in enumerate(room) if free >= sizes[i]]
        if not fitting:
            bins.append([])
            room.append(capacity)
            fitting = [len(bins) - 1]
        best = min(fitting, key=room.__getitem__)
        bins[best].append(i)
        room[best] -= sizes[i]
    return bins


def _row_length(
    max_prompt: int, max_new_tokens: int, group: int, budget: int, most: float, attention_length: float
) -> int:
    """The cheapest of rows that hold 1 … `group` samples of a prompt, for full-length samples of one group."""
    length = lambda samples: max_prompt + samples * max_new_tokens
    cost = lambda samples: math.ceil(group / samples) * length(samples) * (1 + length(samples) / attention_length)
    fitting = [k for k in range(1, group + 1) if length(k) <= most] or [1]
    cheapest = length(min(fitting, key=cost))
    return min(math.ceil(cheapest / ROW_MULTIPLE) * ROW_MULTIPLE, max(budget, cheapest))


def _blocks(
    trajectories: Sequence[Trajectory], kept: list[int], capacity: int, share_prefix: bool, lessons: bool
) -> list[Block]:
    groups: dict[object, list[int]] = {}
    for i in kept:
        _check_fits(i, trajectories[i], capacity, lessons)
        groups.setdefault((trajectories[i].group, trajectories[i].prompt_ids) if share_prefix else i, []).append(i)
    blocks = []
    for members in groups.values():
        prompt = _prompt_room(trajectories[members[0]], lessons)
        lengths = [len(trajectories[i].response_ids) for i in members]
        for part in best_fit(lengths, capacity - prompt):
            blocks.append(Block(tuple(members[j] for j in part), prompt + sum(lengths[j] for j in part)))
    return blocks


def _prompt_room(trajectory: Trajectory, lessons: bool) -> int:
    """Columns for the prompt, the student's or the teacher's, whichever is longer."""
    seen = trajectory.lesson.prompt_ids if lessons else None
    return max(len(trajectory.prompt_ids), len(seen or ()))


def _check_fits(index: int, trajectory: Trajectory, capacity: int, lessons: bool) -> None:
    prompt, response = _prompt_room(trajectory, lessons), len(trajectory.response_ids)
    if not trajectory.prompt_ids:
        raise ValueError(
            f"trajectory {index} has an empty prompt: its first token has no position to be predicted from"
        )
    if prompt + response > capacity:
        raise ValueError(
            f"trajectory {index} has {prompt} prompt and {response} response tokens, a row holds {capacity}: "
            "raise training.row_length, or max_prompt and max_new_tokens of pack_shape"
        )
