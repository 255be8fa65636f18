"""The safetensors files of a Hugging Face folder; no format that can run code is ever opened.

Opening reads headers only; a slice of a tensor reads its own bytes from the mapped file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_post.models.folders import inside

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
UNSAFE = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.npz", "*.npy")
MAX_INDEX = 1 << 28  # bytes
SHOWN = 8
TensorSlice = Any  # safetensors' lazy tensor: get_shape(), get_dtype(), and [slices] -> numpy


def open_tensors(folder: Path) -> dict[str, TensorSlice]:
    """Every tensor of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists.

    Raises:
      ValueError: no safetensors, weights in a format that can run code, a shard that lies outside the folder, a broken
        or truncated file, or an index that disagrees with its shards.
    """
    if (folder / SINGLE).exists():
        return _open_file(_weight_file(folder, SINGLE))
    if not (folder / INDEX).is_file():
        raise ValueError(_nothing_to_read(folder))
    listed = _read_index(folder / INDEX)
    paths = {file: _weight_file(folder, file) for file in sorted(set(listed.values()))}
    shards = {file: _open_file(path) for file, path in paths.items()}
    here = {(name, file) for file, tensors in shards.items() for name in tensors}
    if here != set(listed.items()):
        problems = [f"{name} is not in {file}" for name, file in sorted(set(listed.items()) - here)]
        problems += [f"{name} in {file} is not listed" for name, file in sorted(here - set(listed.items()))]
        raise ValueError(f"{folder / INDEX} disagrees with its shards: {capped(problems)}")
    return {name: shards[file][name] for name, file in listed.items()}


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file, as readable as any new file; the library alone makes it private to its owner."""
    save_file(tensors, path, metadata={"format": "pt"})
    os.chmod(path, path.parent.stat().st_mode & 0o666)


def capped(items: list[str]) -> str:
    """A list for an error message, cut to a readable length."""
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


def _open_file(path: Path) -> dict[str, TensorSlice]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the folder's download is incomplete")
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}): it may be truncated; copy or download it again"
        ) from None


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        if path.stat().st_size > MAX_INDEX:
            raise ValueError(f"longer than {MAX_INDEX} bytes")
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not listed or not all(isinstance(file, str) for file in listed.values()):
            raise TypeError("weight_map must map tensor names to file names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of safetensors shards: {error!r}") from None
    return listed


def _weight_file(folder: Path, name: str) -> Path:
    """The path of a weight file, as `inside`."""
    if not name.endswith(".safetensors") or "\0" in name:
        raise ValueError(f"{folder / INDEX} lists {name!r}: only .safetensors files are read")
    return inside(folder, name)


def _nothing_to_read(folder: Path) -> str:
    unsafe = sorted(path.name for pattern in UNSAFE for path in folder.glob(pattern))
    if unsafe:
        return (
            f"{folder} holds weights only as {capped(unsafe)}: such files can run code when read and are refused; "
            "convert them to safetensors (model.save_pretrained of transformers writes it)"
        )
    return f"{folder} holds no weights: expected {SINGLE}, or {INDEX} with its shards"
