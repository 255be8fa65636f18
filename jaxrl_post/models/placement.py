"""Where the activations of training rows live on the mesh."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.sharding import NamedSharding


@dataclasses.dataclass(frozen=True)
class Placement:
    """`rows` is the sharding of activations [B, T, …]; None leaves it to the compiler, as on one device."""

    rows: NamedSharding | None = None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """The residual stream cut like its rows.

        Without it, and with D of the weights cut over a batch axis, the compiler gathers the rows on every device
        instead of the weights, which are smaller.
        """
        return x_BTD if self.rows is None else lax.with_sharding_constraint(x_BTD, self.rows)


ANYWHERE = Placement()
