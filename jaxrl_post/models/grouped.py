"""Products grouped by expert on NVIDIA GPUs: Pallas kernels (Triton) over blocks of rows of one expert each.

A program of a kernel has one block and a tile of the output's columns; it looks up whose block it has and reads that
expert's weights where they lie. Blocks of an expert follow each other, so that programs that run together read the same
tile. A gradient to weights is a kernel with a program for each tile of an expert, which adds up over its blocks; sums
are float32 (after MegaBlocks, arXiv:2211.15841).

n blocks of C rows, E experts, K width of rows and M of results, D width and F that of experts.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxrl_post.models.product import tile_product

Weights = tuple[jax.Array, ...]
Ref = Any
TILE, STEP = 128, 64  # the most columns of a result that a program has, and of a width that it reads at once
SMALLEST = 16  # columns that a tensor core multiplies


class Run(NamedTuple):
    """`rows`: how many there are in all blocks on average, for estimates; `interpret`: without a GPU, slowly."""

    rows: int
    interpret: bool = False


def unfit(D: int, F: int) -> str | None:
    """Why the kernels cannot serve a model; None if they can."""
    odd = [size for size in (D, F) if size % SMALLEST]
    return f"a width of {odd[0]} is not a multiple of {SMALLEST}" if odd else None


def grouped_swiglu(
    weights: Weights, rows_nCD: jax.Array, expert_n: jax.Array, used: jax.Array, *, run: Run
) -> jax.Array:
    """`moe.swiglu` of rows, each block by its expert's weights [E, …]; blocks from `used` on give 0.

    Widths are multiples of 16, C a power of two of at least 16.
    """
    of = functools.partial(grouped_product, expert_n=expert_n, used=used, run=run)
    gate, up, down = weights
    return of(jax.nn.silu(of(rows_nCD, gate)) * of(rows_nCD, up), down)


def grouped_product(rows_nCK: jax.Array, w_EKM: jax.Array, expert_n: jax.Array, used: jax.Array, run: Run) -> jax.Array:
    """rows · w[expert] of each block, [n, C, M] in the rows' dtype; 0 in blocks from `used` on."""
    return _product(run, rows_nCK, w_EKM, expert_n, used)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(run: Run, rows_nCK: jax.Array, w_EKM: jax.Array, expert_n: jax.Array, used: jax.Array) -> jax.Array:
    return _times(rows_nCK, w_EKM.astype(rows_nCK.dtype), expert_n, used, False, run)


def _forward(run: Run, *inputs: jax.Array) -> tuple[jax.Array, Any]:
    return _product(run, *inputs), inputs


def _backward(run: Run, inputs: Any, dy_nCM: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    rows_nCK, w_EKM, expert_n, used = inputs
    dx_nCK = _times(dy_nCM, w_EKM.astype(dy_nCM.dtype), expert_n, used, True, run)
    dw_EKM = _outer(rows_nCK, dy_nCM, expert_n, used, len(w_EKM), run)
    return dx_nCK, dw_EKM.astype(w_EKM.dtype), None, None


_product.defvjp(_forward, _backward)


def _times(
    x_nCK: jax.Array, w: jax.Array, expert_n: jax.Array, used: jax.Array, transposed: bool, run: Run
) -> jax.Array:
    """x · w[expert], w [E, K, M], or `transposed` [E, M, K]."""
    n, C, K = x_nCK.shape
    E, M = len(w), w.shape[1 if transposed else 2]
    tile = _part(M, TILE)
    if transposed:
        weights = pl.BlockSpec((E, tile, K), lambda i, j: (0, j, 0))
    else:
        weights = pl.BlockSpec((E, K, tile), lambda i, j: (0, 0, j))
    return pl.pallas_call(
        functools.partial(_times_kernel, transposed),
        grid=(n, M // tile),
        in_specs=[
            pl.BlockSpec((1,), lambda i, j: (i,)),
            pl.BlockSpec((1,), lambda i, j: (0,)),
            pl.BlockSpec((None, C, K), lambda i, j: (i, 0, 0)),
            weights,
        ],
        out_specs=pl.BlockSpec((None, C, tile), lambda i, j: (i, 0, j)),
        out_shape=jax.ShapeDtypeStruct((n, C, M), x_nCK.dtype),
        name="grouped_product",
        **_options(K * M, x_nCK, w, run),
    )(expert_n, used[None], x_nCK, w)


def _times_kernel(transposed: bool, expert_ref: Ref, used_ref: Ref, x_ref: Ref, w_ref: Ref, out_ref: Ref) -> None:
    """x [C, K], w [E, K, a tile] or [E, a tile, K], out [C, a tile]."""
    expert, K = expert_ref[0], x_ref.shape[1]
    step = _part(K, STEP)

    def further(k: jax.Array, total: jax.Array) -> jax.Array:
        at = pl.ds(k * step, step)
        w = w_ref[expert, :, at].T if transposed else w_ref[expert, at, :]
        return total + tile_product(x_ref[:, at], w)

    steps = jnp.where(pl.program_id(0) < used_ref[0], jnp.int32(K // step), jnp.int32(0))
    total = lax.fori_loop(0, steps, further, jnp.zeros(out_ref.shape, jnp.float32))
    out_ref[...] = total.astype(out_ref.dtype)


def _outer(x_nCK: jax.Array, dy_nCM: jax.Array, expert_n: jax.Array, used: jax.Array, E: int, run: Run) -> jax.Array:
    """Σ xᵀ · dy over the blocks of each expert, float32 [E, K, M]."""
    (n, C, K), M = x_nCK.shape, dy_nCM.shape[2]
    owner_n = jnp.where(jnp.arange(n) < used, expert_n, E)
    end_E = jnp.searchsorted(owner_n, jnp.arange(E), side="right").astype(jnp.int32)
    first_E = jnp.searchsorted(owner_n, jnp.arange(E), side="left").astype(jnp.int32)
    tall, wide = _part(K, TILE), _part(M, TILE)
    own = pl.BlockSpec((1,), lambda j, k, e: (e,))
    return pl.pallas_call(
        _outer_kernel,
        grid=(K // tall, M // wide, E),
        in_specs=[
            own,
            own,
            pl.BlockSpec((n, C, tall), lambda j, k, e: (0, 0, j)),
            pl.BlockSpec((n, C, wide), lambda j, k, e: (0, 0, k)),
        ],
        out_specs=pl.BlockSpec((None, tall, wide), lambda j, k, e: (e, j, k)),
        out_shape=jax.ShapeDtypeStruct((E, K, M), jnp.float32),
        name="grouped_outer",
        **_options(K * M, x_nCK, dy_nCM, run),
    )(first_E, end_E, x_nCK, dy_nCM)


def _outer_kernel(first_ref: Ref, end_ref: Ref, x_ref: Ref, dy_ref: Ref, out_ref: Ref) -> None:
    """x [n, C, a tile], dy [n, C, a tile], out [a tile, a tile] of one expert."""
    further = lambda i, total: total + tile_product(x_ref[i].T, dy_ref[i])
    out_ref[...] = lax.fori_loop(first_ref[0], end_ref[0], further, jnp.zeros(out_ref.shape, jnp.float32))


def _part(size: int, most: int) -> int:
    """The largest power of two that divides a size, up to `most`."""
    return math.gcd(size, most)


def _options(products: int, x: jax.Array, y: jax.Array, run: Run) -> dict[str, Any]:
    """What all kernels are called with; `products` are those of a row.

    Tiles of float32 are twice as large, and three stages of them do not fit an H100's shared memory.
    """
    moved = x.size * x.dtype.itemsize + y.size * y.dtype.itemsize
    return {
        "compiler_params": triton.CompilerParams(num_warps=8, num_stages=3 if x.dtype.itemsize < 4 else 2),
        "interpret": run.interpret,
        "cost_estimate": pl.CostEstimate(flops=2 * run.rows * products, transcendentals=0, bytes_accessed=moved),
    }
