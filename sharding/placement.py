"""Putting trees of arrays where the rules say. A tree of logical axes has a tuple wherever its tree has an array."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.tree_util import PyTreeDef, keystr

from sharding.rules import Rules, partition_spec

Tree = Any


def tree_shardings(axes_tree: Tree, abstract_tree: Tree, rules: Rules, mesh: Mesh) -> Tree:
    """A `NamedSharding` for each leaf of `abstract_tree` (anything with a shape).

    Raises: ValueError when the structures differ, or as `partition_spec`, naming the leaf's path.
    """

    def sharding(path: Any, leaf: Any, axes: Any) -> NamedSharding:
        name = _name(path)
        if type(axes) is not tuple:
            raise ValueError(f"{name}: expected a tuple of logical axes for shape {leaf.shape}, got {axes!r}")
        return NamedSharding(mesh, partition_spec(axes, leaf.shape, rules, mesh, name))

    # The array tree drives the walk, so tuples that hold logical axes are not mistaken for containers.
    return jax.tree_util.tree_map_with_path(sharding, abstract_tree, axes_tree)


def place(tree: Tree, shardings: Tree) -> Tree:
    """The tree as arrays on `shardings`, whatever devices it is on now.

    Host arrays (numpy, numbers) must be equal on every process; each device is handed only its own part, and 64-bit
    types narrow to 32 unless `jax_enable_x64` is set. Device arrays that already have the sharding share their buffers
    with the result: donating one deletes the other.
    """
    return jax.tree.map(_place, tree, shardings)


def reshard(tree: Tree, shardings: Tree, dtype: Any = None) -> Tree:
    """The tree on other shardings of the same devices (and in another dtype), by one program; always new buffers.

    The program is compiled once for a set of shapes and shardings. Raises: ValueError when the devices differ (use
    `place`).
    """
    leaves, structure = jax.tree.flatten(shardings)
    return _mover(tuple(leaves), structure, dtype)(tree)


def placed_shapes(abstract_tree: Tree, shardings: Tree) -> Tree:
    """Shapes and dtypes with the sharding of each on it: what to restore saved arrays into."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract_tree, shardings
    )


@dataclasses.dataclass(frozen=True)
class LeafBytes:
    """Size of one array: in all, counted once, and on each of its devices."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    total: int
    per_device: int


@dataclasses.dataclass(frozen=True)
class BytesReport:
    """Memory of a tree, in bytes; `per_device` is the fullest device's. `str()` gives a table."""

    total: int
    per_device: int
    leaves: tuple[LeafBytes, ...]

    def __str__(self) -> str:
        header = ("array", "shape", "dtype", "spec", "bytes", "bytes/device")
        rows = [(x.name, str(x.shape), x.dtype, x.spec, f"{x.total:,}", f"{x.per_device:,}") for x in self.leaves]
        rows = [header, *rows, ("total", "", "", "", f"{self.total:,}", f"{self.per_device:,}")]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = "<<<<>>"
        return "\n".join(
            "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
            for row in rows
        )


def bytes_per_device(abstract_tree: Tree, shardings: Tree) -> BytesReport:
    """Bytes of a tree of shapes and dtypes under `shardings`, without making the arrays."""
    load: dict[Any, int] = {}

    def measure(path: Any, leaf: Any, sharding: Sharding) -> LeafBytes:
        width = leaf.dtype.itemsize
        part = math.prod(sharding.shard_shape(leaf.shape)) * width
        for device in sharding.device_set:
            load[device] = load.get(device, 0) + part
        spec = str(tuple(sharding.spec)) if isinstance(sharding, NamedSharding) else type(sharding).__name__
        return LeafBytes(_name(path), leaf.shape, str(leaf.dtype), spec, math.prod(leaf.shape) * width, part)

    measured = jax.tree_util.tree_map_with_path(measure, abstract_tree, shardings)
    leaves = tuple(jax.tree.leaves(measured))
    return BytesReport(sum(x.total for x in leaves), max(load.values(), default=0), leaves)


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Leaves with their paths, `layers/q`, in tree order; a leaf that is the tree has none."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield path_name(path), leaf


def path_name(path: Any) -> str:
    """Of a path into a tree, as JAX gives it: its keys with slashes between."""
    return keystr(path, simple=True, separator="/")


def _name(path: Any) -> str:
    return path_name(path) or "array"


def _place(leaf: Any, sharding: Sharding) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    # A copy, since the CPU backend may keep reading the memory it is handed.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index].copy())


@functools.lru_cache
def _mover(shardings: tuple[Sharding, ...], structure: PyTreeDef, dtype: Any) -> Callable[[Tree], Tree]:
    cast = lambda x: x if dtype is None else x.astype(dtype)
    return jax.jit(lambda tree: jax.tree.map(cast, tree), out_shardings=jax.tree.unflatten(structure, shardings))
