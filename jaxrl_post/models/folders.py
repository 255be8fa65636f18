"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, beside `target`; renamed to it when the block succeeds, removed when it raises.

    Raises: ValueError when `target` is there already and not an empty folder; OSError when it appears meanwhile.
    """
    check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        yield partial
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial)
        raise


def check_free(target: Path) -> None:
    """Raises: ValueError when `target` is there already and not an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} already exists and is not an empty folder: give another, or remove it first")
