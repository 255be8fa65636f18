"""One thread that owns the engine: takes groups of requests from a bounded queue, tells what they sample.

First come, first served. A group is the samples of one prompt, which is prefilled once. Between two calls of the engine
at most `budget` prompt tokens are prefilled, so a long prompt does not stall those that run.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

from jaxrl_post.rollout.decoding import Decoding
from jaxrl_post.rollout.step_programs import Weights
from jaxrl_post.rollout.step_records import Burst, Prefix, Request
from jaxrl_post.rollout.stepper import StepEngine

log = logging.getLogger(__name__)

Listener = Callable[[int, "Burst | Exception"], None]
"""(number of the sample in its group, what it sampled or why it ended without); called on the scheduler's thread."""


class QueueFullError(Exception):
    """The queue holds as many samples as it may."""


class StoppedError(Exception):
    """The server takes nothing more."""


class EngineError(Exception):
    """The engine broke; its own error is in the log."""


@dataclasses.dataclass(eq=False)
class Group:
    """The samples of one prompt. `waiting` ones have no slot yet; `cancelled` ones want none any more."""

    ids: tuple[int, ...]
    requests: Sequence[Request]
    listener: Listener
    waiting: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    cancelled: set[int] = dataclasses.field(default_factory=set)
    prefix: Prefix | None = None


class Scheduler:
    """Start it, `submit` from any thread, `stop` it; it then finishes what it holds, unless told not to."""

    def __init__(
        self,
        engine: StepEngine,
        weights: Weights,
        *,
        max_queue: int,
        budget: int = 512,
        warm_up: Decoding | None = None,
    ):
        """`max_queue`: samples that may wait for a slot. `budget`: prompt tokens prefilled between decode calls.
        `warm_up`: how requests are decoded that must not wait for a compile; all programs are compiled first."""
        self.engine, self._weights, self._max_queue, self._budget = engine, weights, max_queue, budget
        self._groups: collections.deque[Group] = collections.deque()
        self._running: dict[int, tuple[Group, int]] = {}
        self._change = threading.Condition()
        self._stopping, self._broken, self._warm_up = False, False, warm_up
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    @property
    def queued(self) -> int:
        """Samples without a slot."""
        return sum(len(group.waiting) for group in list(self._groups))

    @property
    def running(self) -> int:
        """Samples in slots."""
        return len(self._running)

    @property
    def trouble(self) -> str | None:
        """Why requests are not answered now; None when they are. What comes during the warm-up waits in the queue."""
        if self._broken:
            return "the engine broke"
        if self._stopping or not self._thread.is_alive():
            return "the server shuts down" if self._stopping else "the server has not started"
        return None if self._warm_up is None else "warming up: programs are being compiled"

    def start(self) -> None:
        self._thread.start()

    def stop(self, finish: bool = True) -> None:
        """Take nothing more, and return when all is done; without `finish` what runs is broken off."""
        with self._change:
            self._stopping = True
            if not finish:
                self._break_off(StoppedError("the server shuts down"))
            self._change.notify()
        self._thread.join()

    def submit(self, ids: Sequence[int], requests: Sequence[Request], listener: Listener) -> Group:
        """Queue samples of one prompt. Raises: QueueFullError, StoppedError, and ValueError as `StepEngine.start`."""
        for request in requests:
            self.engine.check(ids, request)
        group = Group(tuple(ids), requests, listener, collections.deque(range(len(requests))))
        with self._change:
            if self._stopping or self._broken:
                raise StoppedError("the server shuts down")
            if self.queued + len(requests) > self._max_queue + self._free():
                raise QueueFullError(f"{self.queued} samples wait for {len(self.engine.slots)} slots, more than may")
            self._groups.append(group)
            self._change.notify()
        return group

    def cancel(self, group: Group, sample: int) -> None:
        """Give a sample up: its listener is not called again (but for a call under way), its slot is freed."""
        with self._change:
            group.cancelled.add(sample)
            self._change.notify()

    # On the scheduler's own thread.

    def _run(self) -> None:
        try:
            self._compile()
            while self._wait():
                self._drop_cancelled()
                self._admit()
                for slot, burst in self.engine.generate(self._weights).items():
                    self._tell(slot, burst)
        except Exception as error:
            log.exception("the engine broke")
            with self._change:
                self._broken = True
                self._break_off(EngineError(f"the engine broke: {type(error).__name__}"))

    def _compile(self) -> None:
        """The warm-up, unless the end comes first."""
        if self._warm_up is None:
            return
        began = time.monotonic()
        for tokens in self.engine.compile_all(self._weights, self._warm_up):
            log.info("warm-up: prompts of up to %d tokens after %.0f s", tokens, time.monotonic() - began)
            if self._stopping:
                break
        self._warm_up = None

    def _wait(self) -> bool:
        """Until there is work; False when there will be none."""
        with self._change:
            while not (self._groups or self._running):
                if self._stopping:
                    return False
                self._change.wait()
        return True

    def _drop_cancelled(self) -> None:
        with self._change:
            for group in self._groups:
                group.waiting = collections.deque(i for i in group.waiting if i not in group.cancelled)
            self._groups = collections.deque(group for group in self._groups if group.waiting)
            for slot, (group, sample) in list(self._running.items()):
                if sample in group.cancelled:
                    self._leave(slot)

    def _admit(self) -> None:
        """Prefill the prompts at the head of the queue and seat their samples, as far as slots and budget go."""
        left = self._budget
        while self._groups and self._free() and left > 0:
            group = self._groups[0]
            prefix = group.prefix or self.engine.begin(group.ids)
            if not prefix.ready:
                before = prefix.length
                prefix = self.engine.advance(self._weights, prefix)
                left -= prefix.length - before
            group.prefix = prefix
            if prefix.ready:
                self._seat(group, prefix)

    def _seat(self, group: Group, prefix: Prefix) -> None:
        for slot in range(len(self.engine.slots)):
            with self._change:
                if slot in self._running or not group.waiting:
                    continue
                sample = group.waiting.popleft()
                self._running[slot] = group, sample
                if not group.waiting:
                    self._groups.popleft()
            self.engine.insert(prefix, slot, group.requests[sample])

    def _tell(self, slot: int, burst: Burst) -> None:
        group, sample = self._running[slot]
        if sample not in group.cancelled:
            group.listener(sample, burst)
        if burst.stop is not None:
            with self._change:
                self._leave(slot)

    def _leave(self, slot: int) -> None:
        self.engine.free(slot)
        del self._running[slot]

    def _free(self) -> int:
        return len(self.engine.slots) - len(self._running)

    def _break_off(self, error: Exception) -> None:
        samples = [(group, i) for group in self._groups for i in group.waiting] + list(self._running.values())
        for group, sample in samples:
            if sample not in group.cancelled:
                group.cancelled.add(sample)
                group.listener(sample, error)
