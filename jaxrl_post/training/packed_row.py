"""One packed row: blocks one after the other, each a copy of a prompt with responses to it.

A response's last token is a target but no input, since nothing is predicted from it; its column stays free, so a row
never has more targets than columns.

N trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_post.types import TrainBatch, Trajectory


class Block(NamedTuple):
    """One copy of a prompt and the trajectories (by index) that continue it; `size` in tokens."""

    members: tuple[int, ...]
    size: int


def write_row(
    row: TrainBatch, blocks: Sequence[Block], trajectories: Sequence[Trajectory], weights_N: np.ndarray
) -> None:
    """Fill a row of zeros with these blocks, in order; weights [N] are each trajectory's tokens' own."""
    column = target = sequence = 0
    for segment, block in enumerate(blocks, start=1):
        prompt = trajectories[block.members[0]].prompt_ids
        trunk_end = _write_columns(row, column, prompt, 0, segment, 0)
        column = trunk_end
        for branch, i in enumerate(block.members, start=1):
            response = trajectories[i].response_ids
            source = np.concatenate([[trunk_end - 1], np.arange(column, column + len(response) - 1)])
            _write_targets(row, target, source, sequence, trajectories[i], weights_N[i])
            column = _write_columns(row, column, response[:-1], len(prompt), segment, branch)
            target, sequence = target + len(response), sequence + 1


def _write_columns(
    row: TrainBatch, start: int, ids: Sequence[int] | np.ndarray, position: int, segment: int, branch: int
) -> int:
    columns = slice(start, start + len(ids))
    row.tokens[columns] = ids
    row.positions[columns] = np.arange(position, position + len(ids))
    row.segments[columns] = segment
    row.branches[columns] = branch
    return columns.stop


def _write_targets(
    row: TrainBatch, start: int, source: np.ndarray, sequence: int, trajectory: Trajectory, weight: float
) -> None:
    live = slice(start, start + len(source))
    row.source[live] = source
    row.target[live] = trajectory.response_ids
    row.sequence[live] = sequence
    row.mask[live] = True
    row.weight[live] = weight
    row.advantage[live] = trajectory.advantage
    row.old_logp[live] = trajectory.logp
    row.rollout_logp[live] = trajectory.logp
