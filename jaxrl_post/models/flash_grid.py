"""How the kernels of `models.flash` lie on a grid of programs, and which blocks each of these visits.

B rows, T columns, H query and K key/value heads, N per-head width, c columns of a block, n = T/c blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as mosaic
from jax.experimental.pallas import triton

Platform = str  # cpu, gpu or tpu
BLOCK = {"cpu": 16, "gpu": 64, "tpu": 128}
# A TPU's core has 64 MiB or more beside its registers. A kernel may take so much of it, and this for arrays in whole.
TPU_MEMORY, TPU_WHOLE = 48 * 2**20, 40 * 2**20
NOBODY = jnp.iinfo(jnp.int32).max


def visits(ids_B2T: jax.Array, block: int) -> jax.Array:
    """For each block of queries the blocks of keys that it visits, int32 [B, n, 1, 1 + n]: how many, then which.

    `ids` are segments and branches. Blocks are told apart by their lowest and highest, so that one may be visited in
    vain; none with a key that a query sees is left out.
    """
    return _listed(may_see(ids_B2T, block))


def visitors(ids_B2T: jax.Array, block: int) -> jax.Array:
    """The reverse of `visits`: for each block of keys the blocks of queries that visit it."""
    return _listed(may_see(ids_B2T, block).swapaxes(1, 2))


def _listed(flags_BXY: jax.Array) -> jax.Array:
    """Of each x how many y are true, and these, then the others: int32 [B, X, 1, 1 + Y]."""
    order_BXY = jnp.argsort(~flags_BXY, axis=-1, stable=True).astype(jnp.int32)
    count_BX1 = flags_BXY.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return jnp.concatenate([count_BX1, order_BXY], axis=-1)[:, :, None]


def may_see(ids_B2T: jax.Array, block: int) -> jax.Array:
    """Bool [B, n of queries, n of keys], True wherever one of the queries sees one of the keys (`attention.sees`)."""
    segments, branches = (x.reshape(len(x), -1, block) for x in (ids_B2T[:, 0], ids_B2T[:, 1]))
    low = lambda ids: jnp.where(segments > 0, ids, NOBODY).min(axis=-1)
    high = lambda ids: jnp.where(segments > 0, ids, -1).max(axis=-1)

    def meet(ids: jax.Array) -> jax.Array:
        low_Bn, high_Bn = low(ids), high(ids)
        return (low_Bn[:, :, None] <= high_Bn[:, None]) & (low_Bn[:, None] <= high_Bn[:, :, None])

    has_trunk = (low(branches) == 0)[:, None]
    number = jnp.arange(segments.shape[1])
    causal = (number[None] <= number[:, None])[None]
    return causal & meet(segments) & (has_trunk | meet(branches))


def heads_at_once(platform: Platform, heads: int, T: int, N: int, itemsize: int) -> int:
    """How many of a key head's query heads one program of the keys' gradients looks at: a divisor, 1 at least.

    A GPU reads what it needs when it needs it; a TPU's core is handed whole rows.
    """
    room = TPU_WHOLE // whole_bytes(T, N, itemsize) if platform == "tpu" else heads
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(room, 1))


def whole_bytes(T: int, N: int, itemsize: int) -> int:
    """What the kernel that takes most takes of a TPU's core for one query head: queries and the output's gradient in
    lines of 128, and two float32 a column in lines of 8; all of it twice, as the next is on its way."""
    return 2 * T * (2 * -(-N // 128) * 128 * itemsize + 2 * 8 * 4)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A program for each row, head and block of `columns`. As many heads read each of the key heads."""

    platform: Platform
    rows: int
    heads: int
    key_heads: int
    columns: int

    def call(
        self,
        name: str,
        kernel: Callable[..., None],
        inputs: Sequence[tuple[str, Any]],
        outputs: Sequence[tuple[str, Any]],
        flops: int,
    ) -> list[jax.Array]:
        """Runs kernel(number of the program's block, *references to parts of inputs and of outputs).

        What a program sees of an array is said by a letter a dimension: its own row `b`, head `h`, key head `k`, number
        of block `i`, its own columns `c`, or all (`:`). Outputs are given as anything of their shape and dtype. `flops`
        are for compilers and plans, which cannot count what depends on the data.
        """
        numbered = lambda *refs: kernel(pl.program_id(self._axes.index("i")), *refs)
        sizes = {"b": self.rows, "h": self.heads, "i": self.columns // self._block}
        moved = sum(x.size * x.dtype.itemsize for _, x in (*inputs, *outputs))
        return pl.pallas_call(
            numbered,
            grid=tuple(sizes[axis] for axis in self._axes),
            in_specs=[self._part(of, x) for of, x in inputs],
            out_specs=[self._part(of, x) for of, x in outputs],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in outputs],
            compiler_params=self._options,
            cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved),
            interpret=self.platform == "cpu",
            name=name,
        )(*(x for _, x in inputs))

    @property
    def _block(self) -> int:
        return BLOCK[self.platform]

    @property
    def _axes(self) -> str:
        """The grid's, so that neighbours in time share keys: on a GPU the first runs fastest, on a TPU the last."""
        return "ihb" if self.platform == "gpu" else "bhi"

    @property
    def _options(self) -> Any:
        match self.platform:
            case "gpu":
                return triton.CompilerParams(num_warps=4, num_stages=2)
            case "tpu":
                return mosaic.CompilerParams(dimension_semantics=("parallel",) * 3, vmem_limit_bytes=TPU_MEMORY)
        return None

    def _part(self, of: str, x: Any) -> pl.BlockSpec:
        def index(*numbers: Any) -> tuple[Any, ...]:
            at = dict(zip(self._axes, numbers, strict=True))
            at |= {"k": lax.div(at["h"], self.heads // self.key_heads), "c": at["i"], ":": 0}
            return tuple(at[letter] for letter in of)

        sizes = tuple({":": size, "c": self._block}.get(letter) for letter, size in zip(of, x.shape, strict=True))
        # The numbers of blocks are read by a TPU's scalar unit.
        scalars = self.platform == "tpu" and "i" in of
        return pl.BlockSpec(sizes, index, memory_space=mosaic.SMEM) if scalars else pl.BlockSpec(sizes, index)
