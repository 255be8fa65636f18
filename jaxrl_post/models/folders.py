"""Folders that appear whole or not at all, and files that lie in the folder they should."""

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


def inside(folder: Path, name: str) -> Path:
    """The path of a file, once it is known to lie in the folder, links followed.

    The one layout that links elsewhere and is accepted is the Hugging Face cache: snapshots/REVISION/ -> blobs/.
    Raises: ValueError for a name that leads out, or is none.
    """
    roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        roots.append(folder.resolve().parent.parent / "blobs")
    try:
        target = (folder / name).resolve()
        target.exists()
    except (OSError, ValueError) as error:  # too long, or no text of this file system
        raise ValueError(f"{folder}: {name[:80]!r} names no file: {error!r:.200}") from None
    lexical = Path(name)
    if lexical.is_absolute() or ".." in lexical.parts or not any(target.is_relative_to(root) for root in roots):
        raise ValueError(
            f"{folder}: file {name!r} is no plain path inside the folder (it leads to {target}) and was not opened; "
            "put the file itself into the folder"
        )
    return folder / name
