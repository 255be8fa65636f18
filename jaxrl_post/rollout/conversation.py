"""Conversations of several turns, exact to the token: what an environment appends is fed after what was sampled.

No turn is decoded and tokenised again, so each turn's ids are a prefix of the next, and its keys and values stay in the
slot. While one environment thinks, the other slots go on.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from jaxrl_post.rollout.step_programs import Weights
from jaxrl_post.rollout.step_records import Burst, Request
from jaxrl_post.rollout.stepper import StepEngine
from jaxrl_post.types import StopReason

TURN_STRIDE = 0x85EBCA6B  # odd: the turns of a conversation have seeds of their own

Environment = Callable[[int, Sequence[int]], Sequence[int] | None]
"""(number of the conversation, its ids so far, prompt included) to the ids that come next, or None: it is over. Called
on several threads at once."""


class Ending(enum.StrEnum):
    """Why a conversation ended."""

    DONE = "done"  # the environment said so
    TURNS = "turns"  # the most turns were taken
    LENGTH = "length"  # a turn came to its limit, or nothing more fits a slot


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What followed a prompt. [n] each: ids int32; mask bool, True for what was sampled; logp and raw_logp float32 (as
    `types.Completion`), 0 for what the environment wrote. `turns` were sampled.
    """

    prompt_ids: tuple[int, ...]
    ids: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    raw_logp: np.ndarray
    turns: int
    ending: Ending


def turn_seed(seed: int, turn: int) -> int:
    """The seed that draws turn 0, 1, …: a turn's noise is that of no other turn."""
    return (seed + turn * TURN_STRIDE) % 2**32


@dataclasses.dataclass
class _Talk:
    """A conversation under way; four numbers a token."""

    number: int
    prompt: tuple[int, ...]
    rows: list[tuple[int, bool, float, float]] = dataclasses.field(default_factory=list)
    turns: int = 0

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *(row[0] for row in self.rows)]

    def sampled(self, burst: Burst) -> None:
        columns = (burst.ids.tolist(), burst.logp.tolist(), burst.raw_logp.tolist())
        self.rows += [(token, True, logp, raw) for token, logp, raw in zip(*columns, strict=True)]
        self.turns += burst.stop is not None

    def appended(self, ids: Sequence[int]) -> None:
        self.rows += [(int(token), False, 0.0, 0.0) for token in ids]

    def close(self, ending: Ending) -> Conversation:
        ids, mask, logp, raw = zip(*self.rows, strict=True)
        floats = lambda x: np.array(x, np.float32)
        return Conversation(
            self.prompt, np.array(ids, np.int32), np.array(mask), floats(logp), floats(raw), self.turns, ending
        )


def converse(
    engine: StepEngine,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    environment: Environment,
    *,
    max_turns: int,
    request: Request,
    workers: int = 8,
) -> list[Conversation]:
    """A conversation of at most `max_turns` sampled turns after each prompt, in their order.

    `request` holds for every turn, its limit too; conversation i draws with id i and the turn's `turn_seed`. All slots
    must be free, and are again at the end. `workers` environments think at once; what one raises is raised here.

    Raises: ValueError as `StepEngine.start`, and for no turns.
    """
    if max_turns < 1:
        raise ValueError(f"max_turns={max_turns}: a conversation has at least one turn")
    with ThreadPoolExecutor(workers) as pool:
        return _Table(engine, weights, environment, max_turns, request, pool).run(prompts)


class _Table:
    """The conversations that sit in slots, and those that wait for a seat."""

    def __init__(
        self,
        engine: StepEngine,
        weights: Weights,
        environment: Environment,
        max_turns: int,
        request: Request,
        pool: ThreadPoolExecutor,
    ):
        self.engine, self.weights, self.environment, self.pool = engine, weights, environment, pool
        self.max_turns, self.request = max_turns, request
        self.talks: dict[int, _Talk] = {}
        self.thinking: dict[Future[Sequence[int] | None], int] = {}
        self.closed: dict[int, Conversation] = {}

    def run(self, prompts: Sequence[Sequence[int]]) -> list[Conversation]:
        waiting = collections.deque(_Talk(i, tuple(prompt)) for i, prompt in enumerate(prompts))
        try:
            while waiting or self.talks:
                for slot in range(len(self.engine.slots)):
                    if slot not in self.talks and waiting:
                        self._seat(slot, waiting.popleft())
                self._step()
                self._listen()
        finally:
            for slot in self.talks:
                self.engine.free(slot)
        return [self.closed[i] for i in range(len(prompts))]

    def _seat(self, slot: int, talk: _Talk) -> None:
        self.engine.start(slot, talk.prompt, self._request(talk, len(talk.prompt)))
        self.talks[slot] = talk

    def _step(self) -> None:
        """One piece for each slot that has something to read, k tokens for each that runs."""
        for slot in self.talks:
            self.engine.feed(self.weights, slot)
        for slot, burst in self.engine.generate(self.weights).items():
            talk = self.talks[slot]
            talk.sampled(burst)
            if burst.stop is StopReason.LENGTH:
                self._close(slot, Ending.LENGTH)
            elif burst.stop is not None and talk.turns == self.max_turns:
                self._close(slot, Ending.TURNS)
            elif burst.stop is not None:
                self.thinking[self.pool.submit(self.environment, talk.number, talk.ids)] = slot

    def _listen(self) -> None:
        """What environments have to say by now; where no slot is busy, the first word is waited for."""
        busy = any(slot.request is not None for slot in self.engine.slots)
        answered, _ = wait(self.thinking, 0 if busy else None, FIRST_COMPLETED) if self.thinking else (set(), set())
        for future in answered:
            self._reply(self.thinking.pop(future), future.result())

    def _reply(self, slot: int, ids: Sequence[int] | None) -> None:
        talk = self.talks[slot]
        if ids is None:
            return self._close(slot, Ending.DONE)
        room = self.engine.columns - len(talk.ids) - len(ids)
        if room < 1:
            return self._close(slot, Ending.LENGTH)
        talk.appended(ids)
        self.engine.extend(slot, ids, self._request(talk, len(talk.ids)))

    def _request(self, talk: _Talk, length: int) -> Request:
        """The next turn's, with what limit still fits the slot."""
        limit = min(self.request.limit, max(1, self.engine.columns - length))
        seed = turn_seed(self.request.seed, talk.turns)
        return dataclasses.replace(self.request, id=talk.number, seed=seed, limit=limit)

    def _close(self, slot: int, ending: Ending) -> None:
        talk = self.talks.pop(slot)
        self.closed[talk.number] = talk.close(ending)
        self.engine.free(slot)
