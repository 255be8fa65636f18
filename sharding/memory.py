"""Arrays in the memory of a device's host: pinned, so that the device reads and writes it by itself."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from sharding.mesh import platform
from sharding.placement import bytes_per_device

Tree = Any
HOST = "pinned_host"


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """The same cut, in the memory of each device's host."""
    if not _memories(sharding.mesh):
        return _PlannedHost(sharding.mesh, sharding.spec)
    return sharding.with_memory_kind(HOST)


def check_host_memory(mesh: Mesh, asked: str, instead: str) -> None:
    """Raises: ValueError where devices reach no memory of their host, naming the setting that asks for it."""
    kinds = _memories(mesh)
    if kinds and HOST not in kinds:
        raise ValueError(
            f"{asked}: {platform(mesh)} devices reach no memory of their host ({HOST}), only {sorted(kinds)}: set "
            f"{instead}"
        )


def placed_bytes(tree: Tree, on_host: bool = False) -> int:
    """On the fullest device, or in its host's memory for it, of arrays or of shapes with shardings."""
    there = [x for x in jax.tree.leaves(tree) if (x.sharding.memory_kind == HOST) == on_host]
    return bytes_per_device(there, [x.sharding for x in there]).per_device


def of_result(sharding: NamedSharding) -> NamedSharding:
    """What to tell `jax.jit` of a result that the program itself puts there."""
    return NamedSharding(sharding.mesh, sharding.spec) if isinstance(sharding, _PlannedHost) else sharding


def to_device(tree: Tree) -> Tree:
    """In a program: copies on the device of arrays that lie in host memory, others as they are."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if _on_host(x) else x, tree)


def put_back(tree: Tree, old: Tree) -> Tree:
    """In a program: arrays in the memory where those of `old` lie."""
    return jax.tree.map(lambda x, y: jax.device_put(x, jax.memory.Space.Host) if _on_host(y) else x, tree, old)


def lies_on_host(tree: Tree) -> bool:
    """In a program: whether any array of the tree lies in host memory."""
    return any(map(_on_host, jax.tree.leaves(tree)))


def _on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def _memories(mesh: Any) -> set[str]:
    """Those that a device of this process reaches; none are known of a GPU that is not there."""
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return {memory.kind for memory in (own or list(mesh.devices.flat))[0].addressable_memories()}


class _PlannedHost(NamedSharding):
    """For GPUs that are not there: jax knows no memories of theirs, and forgets the kind that a sharding is told.

    It must not equal the sharding without a kind, or jax's caches take one for the other.
    """

    @property
    def memory_kind(self) -> str:
        return HOST

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PlannedHost) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((HOST, super().__hash__()))
