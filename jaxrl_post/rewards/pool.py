"""Worker processes that grade: one that hangs or crashes is killed and replaced, and takes one call along."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from jaxrl_post import child_process
from jaxrl_post.rewards.call import Call, Graded, RewardError, failed
from jaxrl_post.rewards.worker import Target

START_SECONDS = 300.0  # for a worker to import a grader's module
IDLE = -1


class Pool:
    """Up to `workers` processes with the target's code; they start when first needed.

    Call it from any thread: no signals are used. No worker outlives the pool, or the process that made it.
    """

    def __init__(self, name: str, target: Target, workers: int, timeout: float) -> None:
        """`timeout` is in seconds for each sample of a call."""
        self._name, self._target, self._most, self._timeout = name, target, workers, timeout
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _end_all, self._workers)

    def __call__(self, calls: Sequence[Call]) -> list[list[Graded]]:
        """What comes of each call, in order: `timeout` for one beyond its limit, `crash` where a worker died of it.

        Raises: RewardError when a worker cannot load the grader.
        """
        with self._lock:
            outcomes: list[list[Graded]] = [[] for _ in calls]
            waiting = deque(i for i, call in enumerate(calls) if call.completions)
            try:
                while waiting or any(worker.at != IDLE for worker in self._workers if worker.ready):
                    self._hand_out(calls, waiting)
                    self._collect(calls, outcomes)
            except BaseException:
                _end_all(self._workers)  # nobody waits for what they are at
                raise
            return outcomes

    def _hand_out(self, calls: Sequence[Call], waiting: deque[int]) -> None:
        idle = [worker for worker in self._workers if worker.ready and worker.at == IDLE]
        for worker in idle:
            if worker.process.poll() is not None:  # it ended between two calls
                self._dismiss(worker)
        busy = sum(worker.ready and worker.at != IDLE for worker in self._workers)
        while len(self._workers) < min(self._most, busy + len(waiting)):
            self._workers.append(_Worker(self._target))
        for worker in self._workers:
            if waiting and worker.ready and worker.at == IDLE:
                i = waiting.popleft()
                worker.grade(i, calls[i], self._timeout * len(calls[i].completions))

    def _collect(self, calls: Sequence[Call], outcomes: list[list[Graded]]) -> None:
        """Wait until a worker has something to say or has had its time."""
        watched = [worker for worker in self._workers if worker.at != IDLE or not worker.ready]
        left = min(worker.deadline for worker in watched) - time.monotonic()
        spoken = wait([worker.connection for worker in watched], max(left, 0.0))
        for worker in watched:
            late = worker.connection not in spoken
            if late and time.monotonic() < worker.deadline:
                continue
            said = None if late else worker.receive()
            if not worker.ready:
                self._begin(worker, said, late)
            elif said is not None:
                outcomes[worker.at], worker.at = [Graded(*one) for one in said], IDLE
            else:
                code = self._dismiss(worker)
                call = calls[worker.at]
                outcomes[worker.at] = (
                    failed(call, "timeout", self._late(call)) if late else failed(call, "crash", _ended(code))
                )

    def _begin(self, worker: _Worker, said: str | None, late: bool) -> None:
        if said == "":
            worker.ready = True
            return
        if said is None:
            said = f"not loaded after {START_SECONDS:g} s" if late else _ended(self._dismiss(worker))
        raise RewardError(f"reward {self._name}: a worker process could not load it: {said}")

    def _late(self, call: Call) -> str:
        each = "" if len(call.completions) == 1 else f" for each of {len(call.completions)} samples"
        return f"had not ended after reward.timeout={self._timeout:g} s{each}"

    def _dismiss(self, worker: _Worker) -> int:
        self._workers.remove(worker)
        return worker.end()


class _Worker:
    """A process and the call it is `at`. It leads a process group of its own, which ends with it."""

    def __init__(self, target: Target) -> None:
        read, self._lifeline = os.pipe()
        self.process, self.connection = child_process.start("jaxrl_post.rewards.worker", _environment(), read)
        os.close(read)
        self.at, self.ready, self.deadline = IDLE, False, time.monotonic() + START_SECONDS
        self._send(tuple(target))

    def grade(self, i: int, call: Call, seconds: float) -> None:
        self.at, self.deadline = i, time.monotonic() + seconds
        self._send(call)

    def receive(self) -> Any:
        """Its next message, None when it has died instead."""
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None

    def end(self) -> int:
        """Its exit code; negative is the signal that ended it."""
        code = self._code_if_ended()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        os.close(self._lifeline)
        ended = self.process.wait()
        return ended if code is None else code

    def _code_if_ended(self) -> int | None:
        """A process that has closed its end is about to end by itself, and its code says of what."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(0.2 if self.connection.poll() else 0)
        return None

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has died, which `receive` tells
            self.connection.send_bytes(pickle.dumps(message))


def _environment() -> dict[str, str]:
    """Of the run, with its import path; JAX, where a grader uses it, leaves the run's accelerators alone."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended its process with code {code}"
    return f"ended its process by {signal.Signals(-code).name}"
