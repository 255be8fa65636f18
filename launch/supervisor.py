"""N processes on this machine as N hosts of one job: start them, show the first, end all together, restart.

The first process's output goes to the terminal, that of each to RUN_DIR/logs/process_I.log.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from launch.faults import REFUSED
from launch.lines import LOST

ALONE_SECONDS = 10.0  # that the others may run on when one has ended
POLL_SECONDS = 0.2
NOISE = b"[Gloo] "  # a line for each group of devices that JAX connects
TAIL = 20  # lines of the log of a process that failed
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


@dataclasses.dataclass(frozen=True)
class Cast:
    """`processes` with `devices` each, started anew at most `max_restarts` times.

    Told to stop they have `grace` seconds.
    """

    processes: int
    devices: int = 1
    max_restarts: int = 0
    grace: float = 120.0

    def __post_init__(self) -> None:
        for name, least in (("processes", 1), ("devices", 1), ("max_restarts", 0)):
            if getattr(self, name) < least:
                option = {"devices": "devices-per-process"}.get(name, name).replace("_", "-")
                raise ValueError(f"--{option} {getattr(self, name)}: at least {least}")


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes on this machine, as if each were a host")
    group.add_argument("--processes", type=int, metavar="N", help="start N, and end all when one fails")
    group.add_argument(
        "--devices-per-process", type=int, default=1, metavar="D", help="CPU devices or GPUs of each (1)"
    )
    group.add_argument("--max-restarts", type=int, default=0, metavar="R", help="go on from the last checkpoint (0)")


def check_supervised(given: argparse.Namespace) -> None:
    """Raises: ValueError where options of --processes come without it, and would be passed over."""
    for option, value, without in (
        ("--devices-per-process", given.devices_per_process, 1),
        ("--max-restarts", given.max_restarts, 0),
    ):
        if given.processes is None and value != without:
            raise ValueError(f"{option} {value} needs --processes: --processes 1 starts and watches a single one")


def supervise(command: Sequence[str], cast: Cast, logs: Path) -> int:
    """Run `command` as every process of a job until it is done; the exit code of the first process that failed, or 0.

    `command` gets the options that make it one of the processes. When a process fails all end within `ALONE_SECONDS`
    and, but for a refusal, start again; what they go on from is their own business. SIGTERM and SIGINT are passed on
    once as SIGTERM, and then nothing starts again; a second one ends all at once.

    Raises: KeyboardInterrupt after a SIGINT, when all have ended.
    """
    told: list[int] = []
    handlers = {
        number: signal.signal(number, lambda n, _: told.append(n)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        for attempt in range(cast.max_restarts + 1):
            code = _attempt(command, cast, logs, told)
            if signal.SIGINT in told:
                raise KeyboardInterrupt
            if code in (0, REFUSED) or told or attempt == cast.max_restarts:
                return code
            print(f"restart {attempt + 1} of {cast.max_restarts}", file=sys.stderr, flush=True)
        raise AssertionError("unreachable")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _attempt(command: Sequence[str], cast: Cast, logs: Path, told: Sequence[int]) -> int:
    coordinator = f"127.0.0.1:{free_port()}"
    started: list[_Process] = []
    try:
        for i in range(cast.processes):
            place = ["--coordinator", coordinator, "--process-id", str(i), "--processes-total", str(cast.processes)]
            started.append(_Process(i, [*command, *place], environment(os.environ, i, cast.devices), logs))
        return _watch(started, cast, told)
    finally:
        for process in started:
            process.end()


def _watch(started: Sequence[_Process], cast: Cast, told: Sequence[int]) -> int:
    """The exit code of the first that failed, once all have ended or have been given the time to."""
    failed: _Process | None = None
    deadline, passed_on = float("inf"), False
    while time.monotonic() < deadline and len(told) < 2 and any(process.code is None for process in started):
        if told and not passed_on:
            passed_on, deadline = True, time.monotonic() + cast.grace
            _pass_on(started, cast)
        failed_now = _failed(started)
        if failed_now and failed is None:
            failed, deadline = failed_now, time.monotonic() + ALONE_SECONDS
        time.sleep(POLL_SECONDS)
    late = [process.number for process in started if process.code is None]
    failed = _failed(started)
    if failed is None and not late:
        return 0
    if late:
        why = f"process {failed.number} failed" if failed else "they were told to stop"
        print(f"ending process {', '.join(map(str, late))}, still running after {why}", file=sys.stderr, flush=True)
    if failed is None:
        return 1
    failed.report()
    return exit_code(failed.code or 1)


def _pass_on(started: Sequence[_Process], cast: Cast) -> None:
    print(
        f"told to stop: every process saves the step it is in and ends, within {cast.grace:g} s; told again, at once",
        file=sys.stderr,
        flush=True,
    )
    for process in started:
        process.popen.send_signal(signal.SIGTERM)


def _failed(started: Sequence[_Process]) -> _Process | None:
    """The first that failed by itself; one that was left alone only where no other did."""
    failed = [process for process in started if process.code]
    return min(failed, key=lambda process: process.code == LOST, default=None)


def exit_code(returned: int) -> int:
    """As a shell gives it: 128 + n for signal n."""
    return 128 - returned if returned < 0 else returned


class _Process:
    """One process, with a thread that copies its output."""

    def __init__(self, number: int, command: Sequence[str], environ: Mapping[str, str], logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.number, self._log = number, logs / f"process_{number}.log"
        self.popen = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt at the terminal reaches this program, which passes it on
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self._copier = threading.Thread(target=self._copy, daemon=True)
        self._copier.start()

    @property
    def code(self) -> int | None:
        return self.popen.poll()

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._copier.join(timeout=5)

    def report(self) -> None:
        """How it ended, and what it said last where that was not on the terminal."""
        self._copier.join(timeout=1)
        code = exit_code(self.code or 0)
        print(f"process {self.number} ended with code {code}; its output is {self._log}", file=sys.stderr)
        if self.number:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
            print("\n".join(f"[{self.number}] {line}" for line in lines), file=sys.stderr, flush=True)

    def _copy(self) -> None:
        assert self.popen.stdout is not None
        with open(self._log, "ab") as log:
            for line in self.popen.stdout:
                log.write(line)
                log.flush()
                if self.number == 0 and not line.startswith(NOISE):
                    _show(line, sys.stdout.buffer)


def _show(line: bytes, to: BinaryIO) -> None:
    to.write(line)
    to.flush()


def environment(environ: Mapping[str, str], number: int, devices: int) -> dict[str, str]:
    """What process `number` starts with: so many devices of a CPU, or its own among the machine's GPUs."""
    flags = f"{environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    known = visible.split(",") if visible else [str(i) for i in range((number + 1) * devices)]
    own = known[number * devices : (number + 1) * devices]
    return {**environ, "XLA_FLAGS": flags, "CUDA_VISIBLE_DEVICES": ",".join(own), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _end_with_parent() -> None:
    """Linux: the kernel ends this process when the one that started it is gone, however that ended."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
