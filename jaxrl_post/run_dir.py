"""Whether a run folder can be had: asked before any device work, and without jax. One run at a time has it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

LOCK = ".lock"
FOLDERS = ("checkpoints", "rollouts", "logs", "faults")  # of a run
FILES = ("config.yaml", "metrics.jsonl", "reward.png", "curve.png")
INSTEAD = "give another one, such as run_dir=runs/name, or mend that one"


def check_run_dir(run_dir: str) -> None:
    """Makes nothing. Raises: ValueError where it, or the folder it is to be made in, is a file or not to be written;
    where things in it are in the way of a run's."""
    if not run_dir.strip() or "\0" in run_dir or run_dir.startswith("~"):
        raise ValueError(f"run_dir={run_dir!r} is no path of a folder (a ~ is not looked up): {INSTEAD}")
    path = Path(run_dir).absolute()
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir():
        raise ValueError(f"run_dir={run_dir}: {there} is a file, and a run writes a folder: {INSTEAD}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"run_dir={run_dir}: nothing can be written in {there} by this user: {INSTEAD}")
    for name in (*FOLDERS, *FILES):
        inside = path / name
        if os.path.exists(inside) and os.path.isdir(inside) != (name in FOLDERS):
            found, wanted = ("folder", "file") if os.path.isdir(inside) else ("file", "folder")
            raise ValueError(f"run_dir={run_dir}: {inside} is a {found}, where a run has a {wanted}: {INSTEAD}")


def make_run_dir(run_dir: str) -> Path:
    """The folder, which is there from now on. Raises: ValueError as `check_run_dir`, and where the system refuses."""
    check_run_dir(run_dir)
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir={run_dir} cannot be made ({error.strerror}): {INSTEAD}") from error
    return Path(run_dir)


class Claim:
    """A run's hold on its folder, which the kernel ends with the process, however that ends. Other processes of the
    run's job do not `hold` it."""

    def __init__(self, run_dir: str, hold: bool = True) -> None:
        """Raises: ValueError as `make_run_dir`, and while another process holds the folder."""
        self.path, self._file = make_run_dir(run_dir), None
        if hold:
            self._file = _opened(self.path / LOCK, run_dir)
            _lock(self._file, run_dir)

    def close(self) -> None:
        if self._file:
            self._file.close()


def _opened(lock: Path, run_dir: str) -> IO[str]:
    try:
        return open(lock, "a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"run_dir={run_dir}: {lock} cannot be written ({error.strerror}): {INSTEAD}") from error


def _lock(file: IO[str], run_dir: str) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        raise ValueError(
            f"run_dir={run_dir} is in use by another run ({file.read(200).strip() or 'which does not say who it is'}), "
            "and two would write over each other: give another run_dir, or end that one first"
        ) from error
    except OSError:  # storage that knows no locks
        return
    with contextlib.suppress(OSError):  # who holds it is only told, and a full disk is met later
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
