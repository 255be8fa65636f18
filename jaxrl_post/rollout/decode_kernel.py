"""Attention of a decode step on NVIDIA GPUs: one Pallas kernel that reads each slot's own columns out of the cache.

XLA hands cuBLAS a layer's keys and values as arrays of their own, so every step would copy the whole cache, a layer at
a time. The kernel takes the stacks as they lie, finds layer, prompt row and columns by number, and reads no column that
its slot does not see: short sequences cost what they are long, and no tiers are needed. One program for each slot and
key head runs over blocks of columns with a running softmax (FlashAttention, arXiv:2205.14135).

L layers, U prompt rows, W prompt columns, S slots, C response columns, K key/value heads, N per-head width, X query
heads of a key head.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec

from jaxrl_post.models.attention import NEGATIVE
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.placement import TENSOR
from jaxrl_post.models.product import tile_product
from jaxrl_post.rollout.cache import Cache, write_column

BLOCK = 64  # columns read at once
FEWEST_HEADS = 16  # rows of the smallest product that tensor cores do
Softmax = tuple[jax.Array, jax.Array, jax.Array]  # the peak [X] and the sum [X] so far, and the weighted values [X, N]


class Seen(NamedTuple):
    """What slots see, int32: the first `length` [S] columns of prompt `row` [S] and the last `sampled` [S] of the ring
    of response columns, up to `column`, which the step writes. A slot of length 0 runs nothing and gets zeros."""

    row: jax.Array
    length: jax.Array
    sampled: jax.Array
    column: jax.Array


def unfit(model: ModelConfig) -> str | None:
    """Why the kernel cannot serve a model; None if it can."""
    if model.head_dim & (model.head_dim - 1) or model.head_dim < 16:
        return f"a head width of {model.head_dim} is not a power of two of at least 16"
    return None


def attend(
    seen: Seen,
    interpret: bool,
    cache: Cache,
    i: jax.Array,
    q_S1HN: jax.Array,
    k_S1KN: jax.Array,
    v_S1KN: jax.Array,
) -> tuple[jax.Array, Cache]:
    """`cache.attend_cache` of layer `i` of scanned layers; `interpret` runs the kernel without a GPU, slowly."""
    S, _, H, N = q_S1HN.shape
    K = k_S1KN.shape[2]
    cache = write_column(cache, i, seen.column, k_S1KN, v_S1KN)
    q_SKXN = q_S1HN.reshape(S, K, H // K, N)
    run = functools.partial(_attended, interpret=interpret)
    out_SKXN = _by_heads(run)(seen, i[None], q_SKXN, cache)
    return out_SKXN.reshape(S, 1, H, N), cache


def _by_heads(run: Any) -> Any:
    """Each device on its own heads: the compiler cannot cut a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape[TENSOR] == 1:
        return run
    whole, stack, heads = PartitionSpec(), PartitionSpec(None, None, TENSOR), PartitionSpec(None, TENSOR)
    return jax.shard_map(
        run, in_specs=(whole, whole, heads, stack), out_specs=heads, axis_names={TENSOR}, check_vma=False
    )


def _attended(seen: Seen, layer_1: jax.Array, q_SKXN: jax.Array, cache: Cache, interpret: bool) -> jax.Array:
    S, K, X, N = q_SKXN.shape
    padded = max(FEWEST_HEADS, 1 << (X - 1).bit_length())
    q_SKXN = jnp.pad(q_SKXN, ((0, 0), (0, 0), (0, padded - X), (0, 0)))
    one, own = pl.BlockSpec((1,), lambda s, h: (0,)), pl.BlockSpec((1,), lambda s, h: (s,))
    head = pl.BlockSpec((None, None, padded, N), lambda s, h: (s, h, 0, 0))

    def stack(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((*x.shape[:2], None, *x.shape[3:]), lambda s, h: (0, 0, h, 0, 0))

    (responses,) = cache.responses
    stacks = (*cache.prompts, *responses)
    seen_pairs = S * K * X * (cache.prompts.columns + responses.columns // 2)  # in the middle of a rollout to the limit
    cost = pl.CostEstimate(
        flops=4 * seen_pairs * N,
        transcendentals=seen_pairs,
        bytes_accessed=2 * seen_pairs // X * N * q_SKXN.dtype.itemsize,
    )
    out = pl.pallas_call(
        _kernel,
        grid=(S, K),
        in_specs=[one, one, own, own, own, head, *map(stack, stacks)],
        out_specs=head,
        out_shape=jax.ShapeDtypeStruct(q_SKXN.shape, q_SKXN.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        cost_estimate=cost,
        name="decode_attention",
    )(layer_1, seen.column[None], seen.row, seen.length, seen.sampled, q_SKXN, *stacks)
    return out[:, :, :X]


def _kernel(
    layer_ref: Any,
    column_ref: Any,
    row_ref: Any,
    length_ref: Any,
    sampled_ref: Any,
    q_ref: Any,
    prompt_k_ref: Any,
    prompt_v_ref: Any,
    response_k_ref: Any,
    response_v_ref: Any,
    out_ref: Any,
) -> None:
    """One slot and key head: q and out [X, N], keys and values [L, rows, columns, N]."""
    layer, slot = layer_ref[0], pl.program_id(0)
    column, length = column_ref[0], length_ref[0]
    sampled = jnp.where(length > 0, sampled_ref[0], 0)
    W, C = prompt_k_ref.shape[2], response_k_ref.shape[2]
    q_XN = q_ref[...]
    own = jnp.arange(BLOCK)

    def of_prompt(j: jax.Array, so_far: Softmax) -> Softmax:
        at = j * BLOCK + own
        k, v = (_columns(x, layer, row_ref[0], j * BLOCK, at < W) for x in (prompt_k_ref, prompt_v_ref))
        return _further(so_far, q_XN, k, v, at < length)

    blocks, first, count = _ring(column, sampled, C)

    def of_response(j: jax.Array, so_far: Softmax) -> Softmax:
        start = lax.rem(first + j, blocks) * BLOCK
        at = start + own
        live = (at < C) & (lax.rem(column - at + C, C) < sampled)
        k, v = (_columns(x, layer, slot, start, at < C) for x in (response_k_ref, response_v_ref))
        return _further(so_far, q_XN, k, v, live)

    X, N = q_XN.shape
    nothing = jnp.full((X,), NEGATIVE), jnp.zeros((X,)), jnp.zeros((X, N))
    seen = lax.fori_loop(0, pl.cdiv(length, BLOCK), of_prompt, nothing)
    _, total_X, sum_XN = lax.fori_loop(0, count, of_response, seen)
    out_ref[...] = (sum_XN / jnp.where(total_X > 0, total_X, 1.0)[:, None]).astype(out_ref.dtype)


def _ring(column: jax.Array, sampled: jax.Array, columns: int) -> tuple[int, jax.Array, jax.Array]:
    """The blocks of the ring; the first that holds any of the last `sampled` columns up to `column`, and how many do,
    counted round. Where the first and the last are one block with others between its ends, that is all of them."""
    blocks = -(-columns // BLOCK)
    start = lax.rem(column - sampled + 1 + columns, columns)
    first, last = start // BLOCK, column // BLOCK
    around = (start > column) & (first == last)
    count = jnp.where(around, blocks, lax.rem(last - first + blocks, blocks) + 1)
    return blocks, first, jnp.where(sampled > 0, count, 0)


def _columns(ref: Any, layer: jax.Array, row: jax.Array, start: jax.Array, there: jax.Array) -> jax.Array:
    """A block of keys or values [BLOCK, N], zeros beyond the last column."""
    block = ref.at[layer, row, pl.ds(start, BLOCK), :]
    return triton.load(block, mask=there[:, None], other=0.0)


def _further(so_far: Softmax, q_XN: jax.Array, k_CN: jax.Array, v_CN: jax.Array, live_C: jax.Array) -> Softmax:
    """The running softmax over a block more."""
    peak_X, total_X, sum_XN = so_far
    score_XC = jnp.where(live_C[None], tile_product(q_XN, k_CN.T) * q_XN.shape[1] ** -0.5, NEGATIVE)
    higher_X = jnp.maximum(peak_X, score_XC.max(axis=1))
    weight_XC = jnp.where(live_C[None], jnp.exp(score_XC - higher_X[:, None]), 0.0)
    fade_X = jnp.exp(peak_X - higher_X)
    sum_XN = sum_XN * fade_X[:, None] + tile_product(weight_XC.astype(v_CN.dtype), v_CN)
    return higher_X, total_X * fade_X + weight_XC.sum(axis=1), sum_XN
