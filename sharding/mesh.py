"""One device mesh with five named axes that always exist; an unused one has size 1."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence

import jax

AXES = ("data", "fsdp", "expert", "sequence", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")


def resolve_sizes(requested: Mapping[str, int], device_count: int, allow_unused: bool = False) -> dict[str, int]:
    """Sizes of all five axes, in the order of `AXES`.

    Args:
      requested: size by axis name; absent axes are 1, and one axis may be -1: all devices that remain.
      device_count: devices to spread over.
      allow_unused: accept a product below `device_count`; a -1 then rounds down.

    Raises: ValueError for an unknown axis, a size that is no positive integer (or -1), two -1, or a product that does
    not fit the device count.
    """
    _check_requested(requested)
    sizes = {axis: requested.get(axis, 1) for axis in AXES}
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    used = math.prod(fixed.values())
    fits = used <= device_count if allow_unused else device_count % used == 0
    if len(fixed) < len(AXES):
        (rest,) = sizes.keys() - fixed.keys()
        if not fits:
            verb, fix = ("exceeds", "is at most") if allow_unused else ("does not divide", "divides")
            raise ValueError(
                f"mesh axis {rest}=-1 cannot be filled: {_product(fixed)} {verb} {_have(device_count)}; give sizes "
                f"whose product {fix} {device_count}"
            )
        sizes[rest] = device_count // used
    elif not fits or (used < device_count and not allow_unused):
        fix = "" if used > device_count else ", or allow unused devices"
        raise ValueError(
            f"mesh {_product(fixed)}, have {_have(device_count)}: make the product {device_count}, "
            f"set one axis to -1 (all that remain){fix}"
        )
    return sizes


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh over the first product-of-`sizes` devices (default: all of `jax.devices()`), tensor axis innermost.

    Every axis is `AxisType.Auto`: the compiler propagates shardings. Raises: as `resolve_sizes`.
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(resolve_sizes(sizes, len(devices), allow_unused=True).values())
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, kinds, devices=devices[: math.prod(shape)])


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Number of pieces a batch is cut into: the product of the batch axes' sizes."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def platform(mesh: jax.sharding.Mesh) -> str:
    """`cpu`, `gpu` or `tpu`: what the mesh's devices are, which need not be the kind that this process runs on."""
    kind = mesh.devices.flat[0].platform
    return "gpu" if kind in ("cuda", "rocm") else kind


def _check_requested(requested: Mapping[str, int]) -> None:
    for axis, size in requested.items():
        if axis not in AXES:
            near = difflib.get_close_matches(axis, AXES, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown mesh axis {axis!r}: did you mean {near!r}? The axes are {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < -1 or size == 0:
            raise ValueError(f"mesh axis {axis}={size!r}: a size is a positive integer, or -1 for all that remain")
    rest = [axis for axis, size in requested.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"mesh axes {' and '.join(rest)} are both -1: only one axis can take the devices that remain")


def _product(sizes: Mapping[str, int]) -> str:
    """`data×fsdp = 3×2=6`, without the axes of size 1."""
    wide = {axis: size for axis, size in sizes.items() if size > 1}
    if len(wide) <= 1:
        return "×".join(f"{axis}={size}" for axis, size in wide.items()) or "of size 1"
    return f"{'×'.join(wide)} = {'×'.join(map(str, wide.values()))}={math.prod(wide.values())}"


def _have(device_count: int) -> str:
    return f"{device_count} device{'s' if device_count != 1 else ''}"
