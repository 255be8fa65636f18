"""Ends a process whose step makes no headway, after it has said what it was waiting for."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time

from sharding.processes import PHASE, WAITING, post, posts

STUCK = 70  # exit code
LAST_WORDS_SECONDS = 10.0


class Watchdog:
    """While it is open no phase may last longer than `minutes` (None: as long as it likes): a run's start, then those
    of its steps.

    The process then writes to standard error what each process of the job is doing and where its own threads are, and
    ends with code 70: a collective that a lost process never joins would last for ever.
    """

    def __init__(self, minutes: float | None) -> None:
        self._minutes = minutes
        self._changed = threading.Condition()
        self._phase, self._since, self._open = "", time.monotonic(), True
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def enter(self, phase: str) -> None:
        """A phase begins, and the one before it is over."""
        with self._changed:
            self._phase, self._since = phase, time.monotonic()
        post(PHASE, phase)

    def __enter__(self) -> Watchdog:
        self.enter("start")
        if self._minutes is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._open = False
            self._changed.notify()

    def _watch(self) -> None:
        assert self._minutes is not None
        with self._changed:
            while self._open:
                left = self._since + self._minutes * 60 - time.monotonic()
                if left <= 0:
                    self._end()
                self._changed.wait(left)

    def _end(self) -> None:
        threading.Timer(LAST_WORDS_SECONDS, os._exit, (STUCK,)).start()  # the other processes may not answer either
        said = f"{self._phase} has lasted {self._minutes:g} minutes, the most that watchdog_minutes allows"
        print(f"stuck: {said}; stacks of this process:", file=sys.stderr)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        with contextlib.suppress(RuntimeError):
            for process, phase in posts(PHASE).items():
                waits = posts(WAITING).get(process)
                print(f"process {process}: {phase}{f', waiting for {waits}' if waits else ''}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(STUCK)
