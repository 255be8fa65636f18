"""How bytes are told to a person."""

from __future__ import annotations

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size_text(size: float) -> str:
    """`3.82 GiB`, `41.50 MiB`: the largest unit of which there is a tenth, `B` below."""
    unit, scale = next(((unit, scale) for unit, scale in UNITS if size >= scale / 10), ("B", 1))
    return f"{size / scale:.2f} {unit}" if scale > 1 else f"{size:.0f} B"
