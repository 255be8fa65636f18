"""The static plan of a rollout on one data replica: how many slots, refilled when, drained how, read in which tiers."""

from __future__ import annotations

import dataclasses

import jax

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.rollout.sampling import Features, Sampling

PIECE = 512
SHORTEST_TIER = 8
FEWEST_SLOTS = 32


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """What to sample; `slots` and `refill` (a data replica each) and `lockstep` change the speed and nothing else."""

    samples_per_prompt: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    slots: int | None = None
    refill: int | None = None
    lockstep: bool = False


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Everything static about a rollout on one data replica; a new value means a new compile.

    slots, refill: sequences decoded at once; free slots awaited before a refill.
    group, width, max_new: samples of a prompt, prompt columns, response columns.
    piece: prompt columns that one prefill runs through the model.
    chunks: response columns of each tier, in all `max_new`; one tier where slots start at different times.
    drain: falling numbers of slots, from `slots`, into which the last sequences are packed; each joins two tiers.
    prompt_rows: prompts in the cache at once.
    unrolled: layers one by one in the program, not a scan over them.
    lockstep: all replicas run the same number of steps.
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

    def __post_init__(self) -> None:
        if self.refill > self.slots:
            raise ValueError(f"refill={self.refill} cannot exceed slots={self.slots}")
        if self.refill % self.group and self.group % self.refill:
            raise ValueError(f"refill={self.refill} must be a multiple or a divisor of the group size {self.group}")

    @property
    def prompts_per_refill(self) -> int:
        return max(1, self.refill // self.group)

    @property
    def pieces(self) -> int:
        return -(-self.width // self.piece)


def engine_shape(
    prompts: int, options: SampleOptions, width: int, sampling: Sampling, model: ModelConfig
) -> EngineShape:
    """The plan for `prompts` prompts a replica. Whole groups are refilled together when a group fits the slots."""
    group, requests = options.samples_per_prompt, prompts * options.samples_per_prompt
    slots = min(options.slots or requests, requests)
    refill = min(options.refill or _refill(slots, group, requests), requests)
    together = slots == requests
    rows_a_refill = max(1, refill // group)
    return EngineShape(
        slots=slots,
        refill=refill,
        group=group,
        width=width,
        max_new=options.max_new_tokens,
        piece=min(width, PIECE),
        chunks=tiers(options.max_new_tokens) if together else (options.max_new_tokens,),
        drain=halvings(slots),
        prompt_rows=min(slots, -(-requests // refill) * rows_a_refill),
        unrolled=jax.default_backend() == "cpu",
        lockstep=options.lockstep,
        features=Features.of(sampling),
    )


def _refill(slots: int, group: int, requests: int) -> int:
    if slots == requests:
        return requests
    if slots >= group:
        return group * max(1, slots // (4 * group))
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
