"""Where the activations of training rows live on the mesh."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

# The mesh axes that cut time, heads and widths, and the experts of a layer.
SEQUENCE, TENSOR, EXPERT = "sequence", "tensor", "expert"


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

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that rows or their time are cut over."""
        cuts = () if self.rows is None else self.rows.spec
        return tuple(axis for cut in cuts for axis in ((cut,) if isinstance(cut, str) else cut or ()))

    @property
    def parts(self) -> int:
        """Devices that time is cut over."""
        if self.rows is None or tuple(self.rows.spec[1:2]) != (SEQUENCE,):
            return 1
        return self.rows.mesh.shape[SEQUENCE]

    def within(self) -> Placement:
        """The placement to a program that is manual over `sequence`: what is left to the compiler."""
        assert self.rows is not None
        return Placement(NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*self.rows.spec[:1])))


ANYWHERE = Placement()
