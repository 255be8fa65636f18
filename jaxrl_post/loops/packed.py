"""The packed rows of an online update as the recipe wants them: mini-batches, shapes, and the way back to trajectories.

A micro-batches, B rows, M targets of an update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrl_post.loops.job import Job
from jaxrl_post.loops.network import check_row
from jaxrl_post.models import backends
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.training.packing import LONGEST_GROUP_ROW, PackReport, PackShape, pack, pack_shape
from jaxrl_post.types import TrainBatch, Trajectory
from sharding.mesh import batch_shards


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


def most_sequences(job: Job, shape: PackShape) -> int:
    """That a row can hold: each has a token, and an update has so many."""
    samples = job.config.data.prompts_per_step * job.config.rollout.samples_per_prompt
    return min(shape.targets, samples // job.config.algorithm.mini_batches)


def numbered(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Each with its number, from 1, in place of an advantage: packed, its targets find their way back."""
    return [dataclasses.replace(t, advantage=float(i)) for i, t in enumerate(trajectories, start=1)]
