"""A process that renders chat templates: its memory and time are limited by the kernel, and it can be killed.

Templates come with models from anywhere. Jinja's sandbox keeps them from Python's objects; what it cannot stop is
`"a" * 10**10` or a loop without end.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from typing import Any

from jaxrl_post import child_process

START_SECONDS = 120.0  # for the process to import Jinja on a busy machine
MEMORY = 1 << 30  # bytes of address space
LONGEST = 1 << 26  # bytes of a rendered text, as JSON


class Renderer:
    """Renders one template at a time, from any thread. The process starts at the first, and anew after a kill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], Any] | None = None

    def render(self, source: str, values: dict[str, Any], seconds: float) -> dict[str, str]:
        """{"text": …}, or {"refused": why} by the sandbox, or {"failed": why}.

        Raises: TypeError or ValueError for values that are not JSON; TimeoutError; MemoryError for a process that
        ended over it, or a text beyond `LONGEST` bytes.
        """
        message = json.dumps({"source": source, "values": values, "seconds": seconds}).encode()
        with self._lock:
            process, connection = self._running = self._running or _start()
            try:
                connection.send_bytes(message)
                if not connection.poll(seconds):
                    raise TimeoutError(f"it has not ended after {seconds:g} s")
                answer: dict[str, str] = json.loads(connection.recv_bytes(LONGEST))
            except (EOFError, OSError) as error:
                self._running = None
                process.kill()
                process.wait()
                connection.close()
                if isinstance(error, TimeoutError):
                    raise
                raise MemoryError(
                    f"it takes more than {MEMORY >> 20} MiB, or makes more than {LONGEST} bytes"
                ) from None
            return answer


@functools.cache
def _of_process(pid: int) -> Renderer:
    return Renderer()


def renderer() -> Renderer:
    """The one of this process; a fork gets its own."""
    return _of_process(os.getpid())


def _start() -> tuple[subprocess.Popen[bytes], Any]:
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.defpath}  # no secrets to look for
    process, ours = child_process.start("jaxrl_post.data.template_worker", environ)
    if not ours.poll(START_SECONDS) or ours.recv_bytes(LONGEST) != b"ready":
        process.kill()
        raise RuntimeError(f"the process that renders chat templates has not started in {START_SECONDS:g} s")
    return process, ours
