"""Who is there: all processes of a job call on process 0 before JAX starts, so that an absent one has a name.

JAX's own start ends the program from within when a peer is late, and does not say which. A message is a line of JSON,
an empty one is a sign of life.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from launch.beats import BEAT

HELLO_SECONDS = 5.0  # for a caller to say who it is
LATE_SECONDS = 5.0  # that a caller waits beyond the limit, to be told by process 0 who is missing
RETRY_SECONDS = 0.2
Message = dict[str, Any]
Connections = dict[int, socket.socket]  # by the process at the other end


class StartError(ValueError):
    """The processes of a job did not find each other."""


@dataclasses.dataclass(frozen=True)
class Place:
    """One process of a job: where process 0 listens (HOST:PORT), which process this is, and of how many.

    `local_devices` are the accelerators of the host that belong to it, None for all.
    """

    coordinator: str
    process: int
    processes: int
    local_devices: tuple[int, ...] | None = None

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def answer(place: Place, limit: float) -> Connections:
    """Return when all processes have called, at most `limit` seconds from now: those of process 0 to all others, or the
    one to process 0.

    Raises: StartError, on each of them, with the coordinator's address and the processes expected and seen; for a
    number that two have, for two totals, and for a port that is taken.
    """
    deadline = time.monotonic() + limit
    return _call_the_roll(place, limit, deadline) if place.process == 0 else _call_in(place, limit, deadline)


def _call_the_roll(place: Place, limit: float, deadline: float) -> Connections:
    with contextlib.ExitStack() as open_until:
        present: Connections = {}
        try:
            for caller in _callers(open_until.enter_context(_listener(place)), deadline):
                open_until.enter_context(caller)
                hello = _read(caller, time.monotonic() + HELLO_SECONDS)
                if hello is None:  # a port scan or a health check
                    continue
                _admit(place, hello, caller, present)
                if len(present) == place.processes - 1:
                    break
            if len(present) < place.processes - 1:
                raise StartError(_absence(place, sorted({0, *present}), limit))
        except StartError as error:
            tell(present, {"error": str(error)})
            raise
        tell(present, {"all": True})
        return {process: caller.dup() for process, caller in present.items()}


def _admit(place: Place, hello: Message, caller: socket.socket, present: Connections) -> None:
    process, processes = hello["process"], hello["processes"]
    where = f"at {place.coordinator}"
    fault = ""
    if processes != place.processes:
        fault = f"process {process} expects {processes} processes {where}, process 0 expects {place.processes}"
    elif process == 0 or process in present:
        fault = f"two processes came as number {process} of {processes} {where}: give each its own --process-id"
    if fault:
        tell({process: caller}, {"error": fault})
        raise StartError(fault)
    present[process] = caller


def _call_in(place: Place, limit: float, deadline: float) -> Connections:
    me = {"process": place.process, "processes": place.processes}
    while time.monotonic() < deadline:
        reply = None
        with contextlib.suppress(OSError), socket.create_connection(place.address, timeout=HELLO_SECONDS) as caller:
            _write(caller, me)
            reply = _read(caller, deadline + LATE_SECONDS)
            if reply is not None and "error" not in reply:
                return {0: caller.dup()}
        if reply is not None:
            raise StartError(reply["error"])
        time.sleep(RETRY_SECONDS)
    raise StartError(
        f"process 0, which listens at {place.coordinator}, did not answer process {place.process} within {limit:g} s: "
        f"1 of {place.processes} processes seen, this one. Start process 0 there with the same --coordinator and "
        "--processes-total, open its port, or wait longer with --join-limit"
    )


def _absence(place: Place, seen: list[int], limit: float) -> str:
    absent = [i for i in range(place.processes) if i not in seen]
    more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
    return (
        f"{len(seen)} of {place.processes} processes came to {place.coordinator} within {limit:g} s; missing: process "
        f"{', '.join(map(str, absent[:8]))}{more}. Start them with the same --coordinator and --processes-total, lower "
        "--processes-total, or wait longer with --join-limit"
    )


def _listener(place: Place) -> socket.socket:
    host, port = place.address
    local = host in ("localhost", "127.0.0.1")
    try:
        if local or not socket.has_dualstack_ipv6():
            return socket.create_server((host if local else "", port))
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError as error:
        raise StartError(
            f"process 0 cannot listen at {place.coordinator} ({os.strerror(error.errno or 0)}): 1 of {place.processes} "
            "processes seen, this one. Another process 0 or another program has that port: give each process its own "
            "--process-id, or --coordinator another port"
        ) from error


def _callers(listener: socket.socket, deadline: float) -> Iterator[socket.socket]:
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(TimeoutError):
            yield listener.accept()[0]


def tell(connections: Connections, message: Message) -> None:
    """Send it to all who are still there."""
    for connection in connections.values():
        with contextlib.suppress(OSError):
            _write(connection, message)


def receive(connection: socket.socket) -> Message | None:
    """One message, {} for a sign of life; None where the other end closed the connection, or sent what is none.

    Raises: OSError.
    """
    with connection.makefile("rb", buffering=0) as lines:  # not a byte of the message after it
        line = lines.readline(65536)
    if line == BEAT:
        return {}
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _write(connection: socket.socket, message: Message) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket, deadline: float) -> Message | None:
    """One message; None when there is none in time."""
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    with contextlib.suppress(OSError):
        return receive(connection)
    return None
