"""The packed rows that a plan's updates would read: of samples or examples as long as they may be."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl_post.loops.job import Job
from jaxrl_post.loops.packed import pack_update
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.flash_grid import BLOCK, may_see
from jaxrl_post.training.offline_packing import ExampleShape, pack_examples
from jaxrl_post.training.packing import PackShape
from jaxrl_post.types import TrainBatch, Trajectory
from jaxrl_post.types_offline import Example

FLASH = ("flash_attend", "flash_grad_queries", "flash_grad_keys")  # kernels of `models.flash`


def longest_rows(job: Job, shape: PackShape) -> TrainBatch:
    """Of an update's samples, each with the longest prompt and run to its limit."""
    config, prompt = job.config, job.train_prompts[0].ids
    group, limit = config.rollout.samples_per_prompt, config.rollout.max_new_tokens
    ids, logp = np.zeros(limit, np.int32), np.zeros(limit, np.float32)
    count = config.data.prompts_per_step * group // config.algorithm.mini_batches
    samples = [Trajectory(i // group, prompt, ids, logp, 1.0) for i in range(count)]
    return pack_update(job, samples, shape, keep_all=True)[0]


def example_rows(examples: Sequence[Example], shape: ExampleShape) -> TrainBatch:
    return pack_examples(examples, shape)[0].rows


def looked_at(rows: TrainBatch, model: ModelConfig) -> dict[str, float]:
    """By name of the kernel the pairs of positions in blocks that it visits, as a share of the half of all that it says
    of itself: it leaves out what samples, and whole groups, do not see of each other."""
    if model.attention != "flash":
        return {}
    block, T = BLOCK[model.platform], rows.segments.shape[-1]
    ids_2BT = np.stack([rows.segments, rows.branches]).reshape(2, -1, T)
    ids_2BT = np.pad(ids_2BT, ((0, 0), (0, 0), (0, -T % block)))
    visits = [int(may_see(jnp.asarray(ids_2T)[None], block).sum()) for ids_2T in ids_2BT.swapaxes(0, 1)]
    _, count, length = ids_2BT.shape
    return dict.fromkeys(FLASH, sum(visits) * block**2 / (count * length**2 / 2))
