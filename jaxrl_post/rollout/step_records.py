"""What the host-driven engine is asked for, what it knows of a slot, and what it answers."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl_post.rollout.decoding import Decoding
from jaxrl_post.rollout.step_cache import Caches
from jaxrl_post.types import StopReason

PLAIN = Decoding()


@dataclasses.dataclass(frozen=True)
class Request:
    """What a sequence asks for: at most `limit` new tokens. (seed, step, id, position) key its draws."""

    limit: int
    decoding: Decoding = PLAIN
    id: int = 0
    seed: int = 0
    step: int = 0


@dataclasses.dataclass
class Slot:
    """`length` tokens are in the cache, `pending` ones are not; `sampled` ones are this request's, `prompt` all before.

    Where stop strings are looked for, `tail` is the end of what was sampled, long enough to begin one.
    """

    request: Request | None = None
    pending: list[int] = dataclasses.field(default_factory=list)
    length: int = 0
    prompt: list[int] = dataclasses.field(default_factory=list)
    sampled: list[int] = dataclasses.field(default_factory=list)
    tail: bytes = b""

    @property
    def running(self) -> bool:
        """Takes part in decode steps: all but its last token have been fed."""
        return self.request is not None and len(self.pending) == 1


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prompt, of which `length` tokens are in a cache of one row. It may be inserted into any number of slots."""

    ids: tuple[int, ...]
    length: int
    cache: Caches

    @property
    def ready(self) -> bool:
        return self.length == len(self.ids) - 1


@dataclasses.dataclass(frozen=True)
class Burst:
    """What one slot sampled in one call: ids int32 [n], logp and raw_logp float32 [n] (as `types.Completion`), the
    likeliest tokens top_ids int32 [n, top] and their raw log-probabilities top_logp float32 [n, top], as many as asked
    for; `stop` None for a sequence that goes on, `stop_string` the one that the last token completes.
    """

    ids: np.ndarray
    logp: np.ndarray
    raw_logp: np.ndarray
    top_ids: np.ndarray
    top_logp: np.ndarray
    stop: StopReason | None
    stop_string: str | None = None
