"""The static plan of a rollout on one data replica: how many slots, refilled when, drained how, read in which tiers.

All of a rollout's requests decode at once when the cache has room for them: the clock then starts at 0 for all, so the
cache can be read in tiers, and the slots that fall idle are drained away. On the rollout benchmark with ragged lengths
(256 requests, 2 CPU cores) this takes 3.1 CPU seconds, where 64 or 128 slots refilled from the queue take 3.4. Where
there is no room the slots are as many as fit, and a refill waits for a quarter of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.rollout import decode_kernel
from jaxrl_post.rollout.decoding import Decoding
from jaxrl_post.rollout.logits import history_bytes
from jaxrl_post.rollout.partial import Of
from jaxrl_post.rollout.sampling import Features, Sampling

PIECE = 512  # prompt columns of one prefill
PREFILL_TOKENS = 16_384  # prompt positions of one prefill, where whole groups allow
SHORTEST_TIER, FEWEST_SLOTS = 8, 32
CACHE_SHARE = 0.25  # of a device's memory
PACKING = 1.5  # packing unrolled layers into half of the slots holds both caches
Backend = Literal["auto", "xla", "triton"]


@dataclasses.dataclass(frozen=True)
class SampleOptions(Decoding):
    """What to sample, all requests alike. `slots` to `lockstep` change the speed and nothing else; `slots` and `refill`
    are of a data replica. `routing` records the experts of each token."""

    samples_per_prompt: int = 1
    max_new_tokens: int = 64
    slots: int | None = None
    refill: int | None = None
    prefill_columns: int = PIECE
    lockstep: bool = False
    routing: bool = False
    attention: Backend = "auto"


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Everything static about a rollout on one data replica; a new value means a new compile.

    slots, refill: sequences decoded at once; free slots awaited before a refill.
    group, width, max_new: samples of a prompt, prompt columns, response columns.
    piece: prompt columns that one prefill runs through the model.
    chunks: response columns of each tier, in all `max_new`; one tier where slots start at different times.
    drain: falling numbers of slots, from `slots`, into which the last sequences are packed; each joins two tiers.
    prompt_rows: prompts in the cache at once; all of them where every request has a slot.
    unrolled: layers one by one in the program, not a scan over them.
    attention: of a decode step: by XLA, by the kernel for NVIDIA GPUs, or by that one interpreted, where there is none.
    lockstep: all replicas run the same number of steps.
    features, top_logprobs: what the draw does beyond the plain one; likeliest tokens recorded with each sampled one.
    partial: the rollout stops when enough samples, or groups, have finished; None: when all have.
    routing: the experts of each token are recorded, of a model that has them.
    """

    slots: int
    refill: int
    group: int
    width: int
    max_new: int
    piece: int
    chunks: tuple[int, ...]
    drain: tuple[int, ...]
    prompt_rows: int
    unrolled: bool
    lockstep: bool
    features: Features
    attention: Literal["xla", "triton", "interpreted"] = "xla"
    top_logprobs: int = 0
    partial: Of | None = None
    routing: bool = False

    def __post_init__(self) -> None:
        if self.refill > self.slots:
            raise ValueError(f"refill={self.refill} cannot exceed slots={self.slots}")
        if self.refill % self.group and self.group % self.refill:
            raise ValueError(f"refill={self.refill} must be a multiple or a divisor of the group size {self.group}")

    @property
    def prompts_per_refill(self) -> int:
        return max(1, self.refill // self.group)

    def describe(self) -> str:
        drained = " → ".join(map(str, self.drain))
        ends = ", ".join(str(sum(self.chunks[: i + 1])) for i in range(len(self.chunks)))
        return (
            f"{drained} slots, {self.refill} filled at once, prompts in pieces of {self.piece} columns, responses read "
            f"up to column {ends}{', in lockstep' if self.lockstep else ''}, attention by {self.attention}"
        )

    @property
    def pieces(self) -> int:
        return -(-self.width // self.piece)

    @property
    def phases(self) -> list[tuple[int, list[int]]]:
        """The slots of each part of the rollout, and the response columns up to the end of each of its tiers."""
        ends = list(itertools.accumulate(self.chunks))
        return [(slots, ends[min(joined, len(ends) - 1) :]) for joined, slots in enumerate(self.drain)]


def engine_shape(
    prompts: int,
    options: SampleOptions,
    width: int,
    sampling: Sampling,
    model: ModelConfig,
    memory: float,
    platform: str,
    partial: Of | None = None,
) -> EngineShape:
    """The plan for `prompts` prompts a replica whose cache may take `memory` bytes, on `cpu`, `gpu` or `tpu`.

    On a CPU layers are unrolled: a product would copy its slice of a stack. On a TPU slots are not packed: its compiler
    would copy the whole cache into another layout, and back, around each packing. On a GPU a kernel reads each slot's
    columns as they lie, so there are no tiers.

    Raises: ValueError for a kernel that the platform or the model does not have.
    """
    attention = decode_attention(options.attention, model, platform)
    group, requests = options.samples_per_prompt, prompts * options.samples_per_prompt
    piece = min(width, options.prefill_columns)
    features = Features.of(sampling)
    slots = min(options.slots or _slots_that_fit(memory, options, width, model, platform, features), requests)
    refill = min(options.refill or _refill(slots, group, requests, piece), requests)
    together = slots == requests
    # The tokens of samples that go on lie in the last columns; a kernel reads the columns it needs.
    tiered = together and partial is None and attention == "xla"
    return EngineShape(
        slots=slots,
        refill=refill,
        group=group,
        width=width,
        max_new=options.max_new_tokens,
        piece=piece,
        chunks=tiers(options.max_new_tokens) if tiered else (options.max_new_tokens,),
        drain=(slots,) if platform == "tpu" else halvings(slots),
        prompt_rows=prompts if together else min(slots, -(-requests // refill) * max(1, refill // group)),
        unrolled=platform == "cpu" and attention == "xla",
        lockstep=options.lockstep,
        features=features,
        attention=attention,
        top_logprobs=options.top_logprobs,
        partial=partial,
        routing=options.routing,
    )


def decode_attention(asked: Backend, model: ModelConfig, platform: str) -> Literal["xla", "triton", "interpreted"]:
    """Raises: ValueError for `triton` where it cannot be."""
    unfit = f"there is no such kernel for a {platform}" if platform == "tpu" else decode_kernel.unfit(model)
    if asked == "triton" and unfit:
        raise ValueError(f"rollout.attention=triton: {unfit}; allowed here: auto, xla")
    if asked == "xla" or unfit or (asked == "auto" and platform != "gpu"):
        return "xla"
    return "triton" if platform == "gpu" else "interpreted"


def cache_memory(tensor_shards: int, device_memory: float | None = None) -> float:
    """Bytes that the cache of a replica may take on its devices; devices of the host's own memory share it.

    `device_memory` is that of devices which are not attached.
    """
    if device_memory is not None:
        return CACHE_SHARE * device_memory * tensor_shards
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / jax.local_device_count()
    else:
        total = (device.memory_stats() or {}).get("bytes_limit", float("inf"))
    return CACHE_SHARE * total * tensor_shards


def _slots_that_fit(
    memory: float, options: SampleOptions, width: int, model: ModelConfig, platform: str, features: Features
) -> int:
    """Slots in so many bytes if each had a prompt of its own, and what penalties remember; whole groups if one fits."""
    column = 2 * model.layers * model.kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize
    columns = width + (PACKING if platform == "cpu" else 1) * options.max_new_tokens
    remembered = history_bytes(features, model.vocab_size, options.max_new_tokens)
    slots = int(min(memory / (column * columns + remembered), 2**30))
    group = options.samples_per_prompt
    return max(1, slots // group * group if slots >= group else slots)


def _refill(slots: int, group: int, requests: int, piece: int) -> int:
    most = group * max(1, PREFILL_TOKENS // piece)
    if slots == requests:
        return min(requests, most)
    if slots >= group:
        return min(group * max(1, slots // (4 * group)), most)
    return max(d for d in range(1, slots + 1) if group % d == 0)


def tiers(columns: int) -> tuple[int, ...]:
    """Chunks whose ends are a quarter, a half and all of the columns; one chunk where there are few."""
    if columns < 4 * SHORTEST_TIER:
        return (columns,)
    quarter = columns // 4
    return (quarter, quarter, columns - 2 * quarter)


def halvings(slots: int) -> tuple[int, ...]:
    """slots, slots/2, slots/4 … down to about FEWEST_SLOTS."""
    out = [slots]
    while out[-1] >= 2 * FEWEST_SLOTS:
        out.append(out[-1] // 2)
    return tuple(out)
