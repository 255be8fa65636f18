"""A Python process that this one starts with exec, never by fork, which does not go with the threads of XLA."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection


def start(module: str, environ: Mapping[str, str], *files: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """`python -m module CONNECTION FILE…` as the leader of a session, and this end of the connection.

    The words are numbers of files that are open there: its end, and `files` of this process.
    """
    ours, theirs = Pipe()
    with theirs:
        passed = (theirs.fileno(), *files)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environ,
        )
    return process, ours
