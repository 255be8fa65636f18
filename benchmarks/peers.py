"""Runs a peer's side of a benchmark in a process of its own, by a Python that has it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

Result = dict[str, float | int | str | list[int]]


def run_peer(python: str, script: str, *arguments: str | Path) -> Result:
    """What the script beside this file prints last: one JSON object."""
    command = [python, str(Path(__file__).parent / script), *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])
