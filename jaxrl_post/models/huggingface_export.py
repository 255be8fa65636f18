"""Writing a Hugging Face folder: safetensors as transformers names and lays them out, config.json, tokenizer files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.models.config import ModelConfig, to_huggingface
from jaxrl_post.models.decoder import Params
from jaxrl_post.models.folders import inside, new_folder
from jaxrl_post.models.huggingface import expected_shapes, parameter_name, read_raw_config
from jaxrl_post.models.shards import INDEX, SINGLE, write_tensors
from jaxrl_post.models.tensor_names import Tensor, tensors_of

COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json",
)  # fmt: skip
Where = dict[str, tuple[str, Tensor, tuple[int, ...]]]  # tensor name -> our parameter, its table entry, (layer, expert)


def save_params(
    folder: str | Path,
    params: Params,
    config: ModelConfig,
    source: Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write `params` as a model folder that appears whole or not at all.

    Args:
      folder: must not exist, or be empty.
      params: the decoder's parameters, each addressable from this process.
      source: the folder the model came from: its tokenizer files and, if it has one, its config.json go along.
      dtype: of the tensors, float32 or bfloat16; None keeps the parameters' own, bit for bit.
      max_shard_bytes: tensors are spread over files of at most this size (a larger tensor has its own), with an index
        when there is more than one.

    Raises: ValueError for a folder that is in use, another dtype, parameters that are not this config's, and a
    tokenizer's file that is a link out of `source`.
    """
    dtype = dtype or config.param_dtype
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: expected float32 or bfloat16")
    flat = {parameter_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    shapes, where = expected_shapes(config), _where(flat, tensors_of(config.family))
    if where.keys() != shapes.keys():
        raise ValueError(f"params do not fit the config: {sorted(where.keys() ^ shapes.keys())[:8]}")
    if source is not None and (source / "config.json").is_file():
        raw = read_raw_config(source)
    else:
        raw = to_huggingface(config)
    # `dtype` is transformers 5's spelling, `torch_dtype` that of older readers.
    raw |= {"dtype": dtype, "torch_dtype": dtype}
    with new_folder(Path(folder)) as partial:
        _write_json(partial / "config.json", raw)
        for path in (source / name for name in COMPANIONS if source is not None):
            if path.is_file():
                shutil.copyfile(inside(path.parent, path.name), partial / path.name)
        _write_tensors(partial, flat, where, _shards(shapes, jnp.dtype(dtype).itemsize, max_shard_bytes), dtype)


def _where(flat: dict[str, jax.Array], table: dict[str, Tensor]) -> Where:
    return {
        name: (parameter, table[parameter], index)
        for parameter, leaf in flat.items()
        for index, name in table[parameter].names(leaf.shape)
    }


def _shards(shapes: dict[str, tuple[int, ...]], itemsize: int, limit: int) -> list[list[str]]:
    """Tensor names of each file: layer by layer in name order, a new file where the next tensor does not fit."""
    shards: list[list[str]] = [[]]
    used = 0
    for name in sorted(shapes, key=_by_layer):
        size = math.prod(shapes[name]) * itemsize
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _by_layer(name: str) -> tuple[int, str]:
    layer = next((int(part) for part in name.split(".") if part.isdecimal()), -1)
    return layer, name


def _write_tensors(folder: Path, flat: dict[str, jax.Array], where: Where, shards: list[list[str]], dtype: str) -> None:
    listed: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(_tensors(flat, where, names, dtype))
        write_tensors(folder / file, tensors)
        listed |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": listed})


def _tensors(
    flat: dict[str, jax.Array], where: Where, names: list[str], dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    for name in names:
        parameter, tensor, index = where[name]
        yield name, tensor.to_theirs(np.asarray(flat[parameter][index], dtype=dtype))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
