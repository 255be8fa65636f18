"""The program of the process that renders chat templates: `python -m jaxrl_post.data.template_worker CONNECTION`."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import jinja2
from jinja2.sandbox import SecurityError

from jaxrl_post.data.chat_template import sandbox
from jaxrl_post.data.template_process import LONGEST, MEMORY


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    for limit, size in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (size, size))
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):  # nobody asks any more
        while True:
            _serve(connection)


def _serve(connection: Connection) -> None:
    asked = json.loads(connection.recv_bytes())
    # Ends this process from the kernel, in a loop of C code too, should the one that asks be gone.
    signal.alarm(math.ceil(asked["seconds"]) + 1)
    answer = json.dumps(_answer(asked["source"], asked["values"])).encode()
    signal.alarm(0)
    connection.send_bytes(answer)


def _answer(source: str, values: dict[str, Any]) -> dict[str, str]:
    try:
        text = _template(source).render(**values)
    except SecurityError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"failed": f"it takes more than {MEMORY >> 20} MiB"}
    except Exception as error:  # the template's own code runs here, and may raise anything
        return {"failed": " ".join(str(error).split())[:2000] or type(error).__name__}
    if len(text) > LONGEST // 12:  # what a character may become as JSON
        return {"failed": f"it makes {len(text)} characters"}
    return {"text": text}


@functools.lru_cache(maxsize=16)
def _template(source: str) -> jinja2.Template:
    return sandbox().from_string(source)


if __name__ == "__main__":
    main()
