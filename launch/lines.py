"""The roll call's connections stay open: when one breaks, the process ends at once and says what it was doing.

A star around process 0. Nothing is sent but a farewell: the kernels ask each other, also while a program hangs.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from launch.faults import BUG
from launch.rollcall import Connections, Place, receive, tell

LOST = 71  # exit code of a process that another one has left alone
ASKED = 6  # times that a kernel asks a silent one, before it is lost
FAREWELL_SECONDS = 10.0  # that the others may run on when one has failed and said so
CAUSE_SECONDS = 2.0  # in which a loss that made this process fail is noticed


class Lines:
    """While it is open this process ends with code 71 when a connection breaks: at once when the process at its other
    end died, after `limit` seconds without an answer when the host or the network did. One that fails says so when it
    leaves, and the others have ten seconds to end by themselves. Process 0 tells all others.
    """

    def __init__(self, place: Place, connections: Connections, limit: float, doing: Callable[[], str]) -> None:
        """`limit`: at least ASKED seconds; `doing` tells what this process is at, for its last words."""
        self._place, self._connections, self._limit, self._doing = place, connections, limit, doing
        self._thread = threading.Thread(target=self._watch, name="lines", daemon=True)
        for connection in connections.values():
            _ask_when_silent(connection, limit)

    def __enter__(self) -> Lines:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.leave(0)

    def leave(self, code: int) -> None:
        """Tell the others that this process ends with `code`. After a failure, wait until a loss that was its cause
        would have been noticed, which then ends the process with a better word for it."""
        if code == BUG:
            self._thread.join(CAUSE_SECONDS)
        tell(self._connections, {"left": code})

    def _watch(self) -> None:
        with selectors.DefaultSelector() as ready:
            for process, connection in self._connections.items():
                ready.register(connection, selectors.EVENT_READ, process)
            while ready.get_map():
                for key, _ in ready.select():
                    connection = self._connections[key.data]
                    self._listen(f"process {key.data} of {self._place.processes}", connection)
                    ready.unregister(connection)

    def _listen(self, name: str, connection: socket.socket) -> None:
        """Return when the process at the other end is done; whatever else it sends, or does not, is this one's end."""
        try:
            message = receive(connection)
        except TimeoutError:
            self._end(f"{name} has not answered for {self._limit:g} s")
        except OSError as error:
            self._end(f"{name} is gone ({error.strerror})")
        if message is None:
            self._end(f"{name} is gone: it was killed, or crashed")
        if "lost" in message:
            self._end(message["lost"])
        if message["left"]:
            failed = f"{name} failed, with exit code {message['left']}"
            # At once: when process 0 has ended, JAX may end this one before its time is up.
            print(f"{failed}; this process is in {self._doing()}", file=sys.stderr, flush=True)
            time.sleep(FAREWELL_SECONDS)
            self._end(failed)

    def _end(self, why: str) -> NoReturn:
        if self._place.process == 0:
            tell(self._connections, {"lost": why})
        print(f"lost: {why}; this process was in {self._doing()}", file=sys.stderr, flush=True)
        os._exit(LOST)


def _ask_when_silent(connection: socket.socket, limit: float) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":  # elsewhere the system's own times hold
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(limit / ASKED))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(limit / ASKED))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit * 1000))
