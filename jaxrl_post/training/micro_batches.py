"""A batch whose arrays all have a leading A, one micro-batch at a time."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

Tree = Any


def micro(batch: Tree, i: jax.Array | int) -> Tree:
    """Micro-batch `i`."""
    return jax.tree.map(lambda field: lax.dynamic_index_in_dim(field, i, axis=0, keepdims=False), batch)
