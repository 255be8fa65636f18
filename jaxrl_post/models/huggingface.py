"""Reading a Hugging Face folder: config.json to `ModelConfig`, safetensors to sharded parameters.

Each device is handed its own slice, read from the mapped file; no process holds a whole copy of the model.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxrl_post.models.config import ModelConfig, from_huggingface
from jaxrl_post.models.decoder import Params, abstract
from jaxrl_post.models.shards import TensorSlice, capped, open_tensors
from jaxrl_post.models.tensor_names import TENSORS, Bounds, Tensor, tensors_of
from sharding.placement import path_name

DTYPES = {"F64", "F32", "F16", "BF16"}
HEAD, EMBED = TENSORS["head"].name, TENSORS["embed"].name
ROWS = 4096  # of the embedding, compared at a time


def read_config(folder: str | Path) -> ModelConfig:
    """The decoder a folder describes.

    Raises: ValueError for a missing folder or config.json, what is no JSON object, and as `from_huggingface`.
    """
    raw = read_raw_config(folder)
    try:
        return from_huggingface(raw)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def read_raw_config(folder: str | Path) -> dict[str, Any]:
    """The JSON object in the folder's config.json. Raises: ValueError, naming the path."""
    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        raise ValueError(f"{folder} is not a folder: give a Hugging Face model folder (config.json, *.safetensors)")
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a model folder needs config.json, *.safetensors and tokenizer.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, not a JSON object")
    return raw


def load_params(folder: str | Path, config: ModelConfig, shardings: Any) -> Params:
    """The folder's weights in `config.param_dtype` on `shardings`, a tree shaped like the decoder's parameters.

    Raises: ValueError, before any array is made, as `open_checked`.
    """
    tensors, table = open_checked(folder, config), tensors_of(config.family)
    shapes = abstract(config)[1]
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, sharding: _load(tensors, table[parameter_name(path)], leaf, sharding), shapes, shardings
    )


def open_checked(folder: str | Path, config: ModelConfig) -> dict[str, TensorSlice]:
    """The folder's tensors, found to be the ones `config` needs; headers are read, and of weights only a tied head.

    Raises:
      ValueError: tensors that are missing, unexpected, of another shape or a quantised dtype (all named), an untied
        model without a head, a tied one with a head of its own, and as `open_tensors`.
    """
    tensors = open_tensors(Path(folder))
    experts = config.moe.count if config.moe else 1
    if config.layers * experts > len(tensors):  # before their names are spelt out
        of_experts = f" with {experts} experts each" if config.moe else ""
        raise ValueError(
            f"{folder}: the weights do not fit config.json: {len(tensors)} tensors, num_hidden_layers={config.layers}"
            f"{of_experts}"
        )
    _check(str(folder), tensors, expected_shapes(config), config.tie_embeddings)
    return tensors


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a checkpoint of this decoder; a tied embedding has no head."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract(config)[1]):
        tensor = tensors_of(config.family)[parameter_name(path)]
        shape = tensor.their_shape(leaf.shape[tensor.stacked :])
        shapes |= dict.fromkeys((name for _, name in tensor.names(leaf.shape)), shape)
    return shapes


def parameter_name(path: Any) -> str:
    """Key of `TENSORS` for a path into the parameter tree."""
    return path_name(path)


def _check(
    folder: str, tensors: Mapping[str, TensorSlice], expected: Mapping[str, tuple[int, ...]], tied: bool
) -> None:
    # Old exports keep the rotary table as a buffer; it follows from the config.
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    head = found.pop(HEAD, None) if tied else None
    problems = list(_problems(found, expected))
    if problems:
        raise ValueError(f"{folder}: the weights do not fit config.json: {capped(problems)}")
    if head is not None:
        _check_tied_head(folder, head, found[EMBED])


def _problems(found: Mapping[str, TensorSlice], expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name in sorted(expected.keys() - found.keys()):
        yield f"{name} is missing" + (" (and config.json says tie_word_embeddings=false)" if name == HEAD else "")
    for name in sorted(found.keys() - expected.keys()):
        yield f"{name} is unexpected"
    for name in sorted(found.keys() & expected.keys()):
        shape, dtype = tuple(found[name].get_shape()), found[name].get_dtype()
        if shape != expected[name]:
            yield f"{name} has shape {list(shape)}, expected {list(expected[name])}"
        if dtype not in DTYPES:
            yield f"{name} has dtype {dtype}, supported are {' '.join(sorted(DTYPES))}"


def _check_tied_head(folder: str, head: TensorSlice, embed: TensorSlice) -> None:
    same = (head.get_shape(), head.get_dtype()) == (embed.get_shape(), embed.get_dtype())
    count = embed.get_shape()[0]
    rows = (slice(i, min(i + ROWS, count)) for i in range(0, count, ROWS))
    if not same or not all(np.array_equal(head[part], embed[part]) for part in rows):
        raise ValueError(
            f"{folder}: config.json says tie_word_embeddings=true, yet {HEAD} differs from {EMBED}: "
            f"set it to false to use the head, or remove {HEAD}"
        )


def _load(
    tensors: Mapping[str, TensorSlice], tensor: Tensor, leaf: jax.ShapeDtypeStruct, sharding: Sharding
) -> jax.Array:
    """One parameter. Devices that hold the same part share one read."""

    @functools.cache
    def read(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        n = tensor.stacked
        part = np.empty([stop - start for start, stop in bounds], leaf.dtype)
        starts = [start for start, _ in bounds[:n]]
        for index in itertools.product(*(range(*ends) for ends in bounds[:n])):
            here = tuple(i - start for i, start in zip(index, starts, strict=True))
            source = tensors[tensor.name_at(index)]
            part[here] = _read_part(source, tensor, leaf.shape[n:], bounds[n:], leaf.dtype)
        return part

    def callback(index: Any) -> np.ndarray:
        return read(tuple(part.indices(n)[:2] for part, n in zip(index, leaf.shape, strict=True)))

    return jax.make_array_from_callback(leaf.shape, sharding, callback)


def _read_part(source: TensorSlice, tensor: Tensor, shape: tuple[int, ...], bounds: Bounds, dtype: Any) -> np.ndarray:
    """Our elements within `bounds` of a weight whose whole shape here is `shape`, cast to `dtype`."""
    part = source[tensor.their_slices(shape, bounds)]
    return np.ascontiguousarray(tensor.to_ours(part, shape, bounds), dtype=dtype)
