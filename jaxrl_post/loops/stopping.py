"""Being told to end early."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from sharding.processes import exchange

STOPPED = "told to stop: step {step} is saved, and the same command goes on from it"
# To end, and what a second one does.
ORDERS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


class Stop:
    """While it is open SIGTERM or SIGINT asks the run to end after its step; a second one ends the process at once.

    Signals reach a program in its main thread; a run in another one is not asked. Leaving it after a SIGINT raises
    KeyboardInterrupt, when all that was to be done is done.
    """

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._before: dict[int, Any] = {}

    def agreed(self, also: bool = False) -> bool:
        """Whether any process was told, or has a reason of its own (`also`); the same on all."""
        return any(exchange(bool(self._told) or also))

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {order: signal.signal(order, self._note) for order in ORDERS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        for order, handler in self._before.items():
            signal.signal(order, handler)
        if signal.SIGINT in self._told and kind is None:
            raise KeyboardInterrupt

    def _note(self, order: int, _: object) -> None:
        self._told.add(order)
        for number, handler in ORDERS.items():
            signal.signal(number, handler)
        if order == signal.SIGINT:
            print("ending after this step, which is saved; once more ends at once", file=sys.stderr, flush=True)
