"""Whether a run folder can be had: asked before any device work, and without jax."""

from __future__ import annotations

import os
from pathlib import Path

INSTEAD = "give another one, such as run_dir=runs/name, or mend that one"


def check_run_dir(run_dir: str) -> None:
    """Makes nothing. Raises: ValueError where it, or the folder it is to be made in, is a file or not to be written."""
    path = Path(run_dir).absolute()
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir():
        raise ValueError(f"run_dir={run_dir}: {there} is a file, and a run writes a folder: {INSTEAD}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"run_dir={run_dir}: nothing can be written in {there} by this user: {INSTEAD}")


def make_run_dir(run_dir: str) -> Path:
    """The folder, which is there from now on. Raises: ValueError as `check_run_dir`, and where the system refuses."""
    check_run_dir(run_dir)
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir={run_dir} cannot be made ({error.strerror}): {INSTEAD}") from error
    return Path(run_dir)
