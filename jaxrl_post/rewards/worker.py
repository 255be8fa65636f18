"""The program of a worker process: grades the calls that come through a pipe, until that is closed.

`python -m jaxrl_post.rewards.worker CONNECTION LIFELINE`, both numbers of open files. What it sends is JSON, so the run
never unpickles anything that was made beside a model's answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from jaxrl_post.rewards.call import answer
from jaxrl_post.rewards.function import RewardFunction, load_function


class Target(NamedTuple):
    """A grader's code: `module:function` of (prompts, completions, rows, **options)."""

    function: str
    options: dict[str, Any]

    def load(self) -> RewardFunction:
        """Raises: ValueError as `load_function`."""
        return load_function(self.function, options=self.options)


def main() -> None:
    connection, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    _end_with(lifeline)
    with contextlib.suppress(EOFError, OSError):  # the run is over
        _serve(connection)


def _serve(connection: Connection) -> None:
    try:
        function = Target(*pickle.loads(connection.recv_bytes())).load()
    except ValueError as error:
        _send(connection, str(error))
        return
    _send(connection, "")
    while True:
        _send(connection, answer(function, pickle.loads(connection.recv_bytes())))


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _end_with(lifeline: int) -> None:
    """Have the kernel kill this process and its children when the run, the only writer of the pipe, is no more.

    It does so even while native code holds the interpreter. A parent-death signal would not do: it comes when the
    thread that started this process ends.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if not os.read(lifeline, 1):  # it ended before it could be asked
            sys.exit()


if __name__ == "__main__":
    main()
