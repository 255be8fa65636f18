"""Which mesh axes each logical axis of an array is cut over. A layout is one `Rules`; a variant is one `replace`.

Notation follows the logical-axis tables of Flax and t5x; the checks name both sides of every conflict.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from sharding.mesh import AXES, BATCH_AXES

MeshAxes = tuple[str, ...]
LogicalAxes = tuple[str | None, ...]
AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class Rules:
    """Mesh axes by logical axis; () keeps the axis whole on every device.

    Raises: ValueError when a field is not a tuple of distinct mesh axes.
    """

    layers: MeshAxes = ()
    embed: MeshAxes = ()
    heads: MeshAxes = ()
    kv_heads: MeshAxes = ()
    head_dim: MeshAxes = ()
    mlp: MeshAxes = ()
    expert: MeshAxes = ()
    vocab: MeshAxes = ()
    batch: MeshAxes = ()
    length: MeshAxes = ()

    def __post_init__(self) -> None:
        for logical, axes in vars(self).items():
            distinct = isinstance(axes, tuple) and set(axes) <= set(AXES) and len(set(axes)) == len(axes)
            if not distinct:
                raise ValueError(f"Rules.{logical}={axes!r}: expected a tuple of distinct mesh axes among {AXES}")

    def mesh_axes(self, logical: str | None) -> MeshAxes:
        """Mesh axes of one logical axis; None is never cut. Raises: ValueError for an unknown name."""
        table = vars(self)
        if logical is None:
            return ()
        if logical not in table:
            near = difflib.get_close_matches(logical, table, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown logical axis {logical!r}: did you mean {near!r}? Known: {', '.join(table)}")
        return table[logical]


TRAIN = Rules(
    embed=("fsdp",),
    heads=("tensor",),
    kv_heads=("tensor",),
    mlp=("tensor",),
    expert=("expert",),
    vocab=("tensor",),
    batch=BATCH_AXES,
    length=("sequence",),
)
# The rollout engine runs every batch shard on its own, so each needs whole weights (up to the tensor axis). Experts
# stay cut: the replicas along `expert` run their steps together.
ROLLOUT = dataclasses.replace(TRAIN, embed=())


@dataclasses.dataclass(frozen=True)
class Stage:
    """The layouts of weights between updates and of gradients in one; an optimizer's moments follow TRAIN."""

    weights: Rules
    gradients: Rules


# What `mesh.fsdp` cuts, by ZeRO's stages (arXiv:1910.02054): moments; gradients too; weights too.
ZERO = {1: Stage(ROLLOUT, ROLLOUT), 2: Stage(ROLLOUT, TRAIN), 3: Stage(TRAIN, TRAIN)}


def partition_spec(axes: LogicalAxes, shape: tuple[int, ...], rules: Rules, mesh: AnyMesh, name: str) -> PartitionSpec:
    """The spec of one array.

    Args:
      axes: a logical axis, or None, for each dim of `shape`.
      name: what the array is called in errors.

    Mesh axes of size 1 and trailing whole dims are left out, so that equal layouts compare equal.

    Raises: ValueError when ranks differ, a logical axis is unknown, two dims claim one mesh axis, or a size does not
    divide.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{name}: logical axes {axes} name {len(axes)} dims, the shape {shape} has {len(shape)}")
    cuts = [_wide(rules, logical, mesh, name, dim) for dim, logical in enumerate(axes)]
    _check_collisions(cuts, axes, mesh, name)
    for dim, cut in enumerate(cuts):
        _check_divides(dim, cut, axes[dim], shape[dim], mesh, name)
    while cuts and not cuts[-1]:
        cuts.pop()
    return PartitionSpec(*(cut[0] if len(cut) == 1 else cut or None for cut in cuts))


def _wide(rules: Rules, logical: str | None, mesh: AnyMesh, name: str, dim: int) -> MeshAxes:
    """The mesh axes of size > 1 that cut a dim."""
    try:
        return tuple(axis for axis in rules.mesh_axes(logical) if mesh.shape[axis] > 1)
    except ValueError as error:
        raise ValueError(f"{name}, dim {dim}: {error}") from None


def _check_collisions(cuts: list[MeshAxes], axes: LogicalAxes, mesh: AnyMesh, name: str) -> None:
    owner: dict[str, int] = {}
    for dim, cut in enumerate(cuts):
        for axis in cut:
            first = owner.setdefault(axis, dim)
            if first != dim:
                raise ValueError(
                    f"{name}: dim {first} ({axes[first]}) and dim {dim} ({axes[dim]}) are both cut over mesh axis "
                    f"{axis}={mesh.shape[axis]}: give one of them another mesh axis in the rules, or set {axis}=1"
                )


def _check_divides(dim: int, cut: MeshAxes, logical: str | None, size: int, mesh: AnyMesh, name: str) -> None:
    sizes: Mapping[str, int] = {axis: mesh.shape[axis] for axis in cut}
    ways = math.prod(sizes.values())
    if size % ways == 0:
        return
    wanted = next(n for n in range(ways, 0, -1) if size % n == 0)
    over = " × ".join(f"{axis}={n}" for axis, n in sizes.items())
    product = f" = {ways}" if len(cut) > 1 else ""
    change = "their product" if len(cut) > 1 else cut[0]
    raise ValueError(
        f"{name}: dim {dim} ({logical}) of size {size} cannot be cut over mesh {over}{product}: {size} is not a "
        f"multiple of {ways}; lower {change} to {wanted}, or make {logical} a multiple of {ways}"
    )
