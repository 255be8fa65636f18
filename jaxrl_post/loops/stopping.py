"""Being told to end early."""

from __future__ import annotations

import signal
import threading
from typing import Any

from sharding.processes import exchange

STOPPED = "told to stop: step {step} is saved, and the same command goes on from it"


class Stop:
    """While it is open SIGTERM asks the run to end after its step; a second one ends the process at once.

    Signals reach a program in its main thread; a run in another one is not asked.
    """

    def __init__(self) -> None:
        self._told = False
        self._before: Any = None

    def agreed(self, also: bool = False) -> bool:
        """Whether any process was told, or has a reason of its own (`also`); the same on all."""
        return any(exchange(self._told or also))

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: object) -> None:
        self._told = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
