"""Worker processes that grade: one that hangs or crashes is killed and replaced, and takes one call along."""

from __future__ import annotations

import contextlib
import functools
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from jaxrl_post import child_process
from jaxrl_post.rewards.call import Call, Graded, RewardError, failed
from jaxrl_post.rewards.worker import Target

START_SECONDS = 300.0  # for a worker to import a grader's module


class Pool:
    """Up to `workers` processes with the target's code; they start when first needed.

    Call it from any thread: no signals are used. No worker outlives the pool, or the process that made it.
    """

    def __init__(self, name: str, target: Target, workers: int, timeout: float) -> None:
        """`timeout` is in seconds for each sample of a call."""
        self._crew = _Crew(name, target, workers, timeout)
        self.close = weakref.finalize(self, self._crew.stop)

    def submit(self, calls: Sequence[Call]) -> list[Future[list[Graded]]]:
        """What will come of each call, begun in this order: `timeout` for one beyond its limit, `crash` where a worker
        died of it. A result raises RewardError when a worker cannot load the grader, CancelledError after `stop`."""
        return self._crew.submit(calls)

    def stop(self) -> None:
        """End the workers and forget the calls that wait; a later one starts workers anew."""
        self._crew.stop()

    @property
    def seconds(self) -> float:
        """How long workers have been grading, whether one or all of them."""
        return self._crew.seconds


class _Task(NamedTuple):
    call: Call
    outcome: Future[list[Graded]]


class _Crew:
    """The workers and what waits for them. A thread serves them for as long as there is a call to be graded."""

    def __init__(self, name: str, target: Target, most: int, timeout: float) -> None:
        self._name, self._target, self._most, self._timeout = name, target, most, timeout
        self._lock = threading.RLock()  # of all below; a garbage collection may call `stop` anywhere
        self._workers: list[_Worker] = []
        self._waiting: deque[_Task] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._ear, self._bell = Pipe(duplex=False)
        self._seconds, self._since, self._grading = 0.0, 0.0, False

    def submit(self, calls: Sequence[Call]) -> list[Future[list[Graded]]]:
        tasks = [_Task(call, Future()) for call in calls]
        for task in tasks:
            if not task.call.completions:
                task.outcome.set_result([])
        with self._lock:
            self._waiting.extend(task for task in tasks if task.call.completions)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"reward {self._name}", daemon=True)
                self._thread.start()
            else:
                self._bell.send_bytes(b"")
        return [task.outcome for task in tasks]

    def stop(self) -> None:
        with self._lock:
            thread, self._stopping = self._thread, True
            if thread is None:
                self._end()
                return
            self._bell.send_bytes(b"")
        if thread is not threading.current_thread():
            thread.join()

    @property
    def seconds(self) -> float:
        with self._lock:
            self._count()
            return self._seconds

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._prepared():
                    self._thread = None
                    return
                watched = [worker for worker in self._workers if worker.task or not worker.ready]
                left = min(worker.deadline for worker in watched) - time.monotonic()
            spoken = wait([self._ear, *(worker.connection for worker in watched)], max(left, 0.0))
            with self._lock:
                while self._ear.poll():
                    self._ear.recv_bytes()
                if self._stopping:
                    continue
                self._or_end(functools.partial(self._collect, watched, spoken))

    def _prepared(self) -> bool:
        """Whether there is something to wait for, after all that can be begun has been."""
        if self._stopping:
            self._end()
        self._or_end(self._hand_out)
        self._count()
        return any(worker.task or not worker.ready for worker in self._workers)

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if worker.ready and worker.task is None]
        for worker in idle:
            if worker.process.poll() is not None:  # it ended between two calls
                self._dismiss(worker)
        busy = sum(worker.task is not None for worker in self._workers)
        while len(self._workers) < min(self._most, busy + len(self._waiting)):
            self._workers.append(_Worker(self._target))
        for worker in self._workers:
            if self._waiting and worker.ready and worker.task is None:
                task = self._waiting.popleft()
                worker.grade(task, self._timeout * len(task.call.completions))

    def _collect(self, watched: Sequence[_Worker], spoken: Sequence[Any]) -> None:
        """What workers have said, and the end of those that have had their time."""
        for worker in watched:
            late = worker.connection not in spoken
            if late and time.monotonic() < worker.deadline:
                continue
            said = None if late else worker.receive()
            if worker.task is None:
                self._begin(worker, said, late)
                continue
            task, worker.task = worker.task, None
            if said is not None:
                task.outcome.set_result([Graded(*one) for one in said])
            else:
                code = self._dismiss(worker)
                call = task.call
                task.outcome.set_result(
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

    def _or_end(self, work: Callable[[], None]) -> None:
        """Whatever goes wrong is for those who wait for the calls."""
        try:
            work()
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        """Of all workers and calls, which fail with the error or are cancelled."""
        tasks = [worker.task for worker in self._workers if worker.task] + list(self._waiting)
        self._waiting.clear()
        while self._workers:
            self._workers.pop().end()
        for task in tasks:
            if error is None:
                task.outcome.cancel()
            else:
                task.outcome.set_exception(error)
        self._stopping = False

    def _count(self) -> None:
        now = time.monotonic()
        self._seconds += (now - self._since) * self._grading
        self._since, self._grading = now, any(worker.task for worker in self._workers)


class _Worker:
    """A process and the task it is at. It leads a process group of its own, which ends with it."""

    def __init__(self, target: Target) -> None:
        read, self._lifeline = os.pipe()
        self.process, self.connection = child_process.start("jaxrl_post.rewards.worker", _environment(), read)
        os.close(read)
        self.task: _Task | None = None
        self.ready, self.deadline = False, time.monotonic() + START_SECONDS
        self._send(tuple(target))

    def grade(self, task: _Task, seconds: float) -> None:
        self.task, self.deadline = task, time.monotonic() + seconds
        self._send(task.call)

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


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended its process with code {code}"
    return f"ended its process by {signal.Signals(-code).name}"
