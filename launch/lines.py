"""The roll call's connections stay open: when one breaks or is silent, the process ends and says what it was doing.

A star around process 0. Each end has a process beside it that sends beats, also while its program hangs (`beats`), and
the kernels ask each other.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from launch import beats
from launch.faults import BUG
from launch.rollcall import Connections, Place, receive, tell

LOST = 71  # exit code of a process that another one has left alone
ASKED = 6  # times that a kernel asks a silent one, before it is lost
FAREWELL_SECONDS = 10.0  # that the others may run on when one has failed and said so
UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)  # a kernel gave up asking
CAUSE_SECONDS = 2.0  # in which a loss that made this process fail is noticed


class Lines:
    """While it is open this process ends with code 71 when a connection breaks: at once when the process at its other
    end died, after `limit` seconds without an answer when the host or the network did, or when that process is stopped.
    One that fails says so when it leaves, and the others have ten seconds to end by themselves. Process 0 tells all
    others.
    """

    def __init__(self, place: Place, connections: Connections, limit: float, doing: Callable[[], str]) -> None:
        """`limit`: at least ASKED seconds; `doing` tells what this process is at, for its last words."""
        self._place, self._connections, self._limit, self._doing = place, connections, limit, doing
        self._thread = threading.Thread(target=self._watch, name="lines", daemon=True)
        self._beats: subprocess.Popen[bytes] | None = None
        for connection in connections.values():
            _ask_when_silent(connection, limit)

    def __enter__(self) -> Lines:
        self._thread.start()
        with contextlib.suppress(OSError):  # of whom nothing is heard, nothing is expected
            self._beats = _start_beats(self._connections, self._limit / ASKED)
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
        if self._beats:
            self._beats.kill()
            self._beats.wait()

    def _watch(self) -> None:
        heard: dict[int, float] = {}  # when there was something of each process; its first beat starts the count
        with selectors.DefaultSelector() as ready:
            for process, connection in self._connections.items():
                ready.register(connection, selectors.EVENT_READ, process)
            while ready.get_map():
                now = time.monotonic()
                left = min(heard.values(), default=math.inf) + self._limit - now
                spoken = {key.data for key, _ in ready.select(max(left, 0.0) if heard else None)}
                for process in spoken:
                    if self._listen(process):
                        heard[process] = time.monotonic()
                    else:
                        ready.unregister(self._connections[process])
                        heard.pop(process, None)
                # What came while this process was stopped itself, or waited for Python's lock, has been read by now.
                for process in heard.keys() - spoken:
                    if heard[process] + self._limit <= now:
                        self._end(self._silent(process))

    def _listen(self, process: int) -> bool:
        """Whether the process at the other end goes on; what it sends, or does not, may be this one's end."""
        name = self._name(process)
        try:
            message = receive(self._connections[process])
        except OSError as error:
            if error.errno in UNREACHED:
                self._end(self._silent(process))
            message = None  # reset: it died with beats unread
        if message is None:
            self._end(f"{name} is gone: it was killed, or crashed")
        if not message:
            return True
        if "lost" in message:
            self._end(message["lost"])
        if message["left"]:
            failed = f"{name} failed, with exit code {message['left']}"
            # At once: when process 0 has ended, JAX may end this one before its time is up.
            print(f"{failed}; this process is in {self._doing()}", file=sys.stderr, flush=True)
            time.sleep(FAREWELL_SECONDS)
            self._end(failed)
        return False

    def _name(self, process: int) -> str:
        return f"process {process} of {self._place.processes}"

    def _silent(self, process: int) -> str:
        return f"{self._name(process)} has not answered for {self._limit:g} s"

    def _end(self, why: str) -> NoReturn:
        if self._place.process == 0:
            tell(self._connections, {"lost": why})
        print(f"lost: {why}; this process was in {self._doing()}", file=sys.stderr, flush=True)
        os._exit(LOST)


def _start_beats(connections: Connections, seconds: float) -> subprocess.Popen[bytes]:
    numbers = [connection.fileno() for connection in connections.values()]
    words = [sys.executable, "-I", "-S", beats.__file__, str(os.getpid()), str(seconds), *map(str, numbers)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(words, pass_fds=numbers, stdin=quiet, stdout=quiet, stderr=quiet)


def _ask_when_silent(connection: socket.socket, limit: float) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":  # elsewhere the system's own times hold
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(limit / ASKED))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(limit / ASKED))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit * 1000))
