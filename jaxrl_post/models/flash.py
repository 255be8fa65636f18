"""Attention of packed rows as Pallas kernels, one source for GPUs (Triton) and TPUs (Mosaic); no [T, T] array exists.

FlashAttention-2's recurrences (arXiv:2307.08691). A program of a kernel has one block of queries and visits the blocks
of keys that one of them may see, or has keys and visits queries: a row that is a forest has few of these. Who sees whom
inside of a block is decided there, by the rule that all backends share. Key heads are never repeated for the queries
that read them.

B rows, T columns, H query and K key/value heads, G = H/K, N per-head width, c columns of a block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxrl_post.models.attention import NEGATIVE, Columns, sees
from jaxrl_post.models.flash_grid import BLOCK, Grid, Platform, heads_at_once, visitors, visits

Ref = Any


class Blocks(NamedTuple):
    """What the kernels read: heads before columns, filled up to whole blocks. q [B, H, T, N], k and v [B, K, T, N], ids
    (segments, branches) int32 [B, 2, T]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    ids: jax.Array


class Said(NamedTuple):
    """What gradients need of the whole row: the gradient to the output [B, H, T, N], and float32 [B, H, 1, T] the
    logarithm of what weights are divided by, and the gradient's product with the output."""

    grad: jax.Array
    normal: jax.Array
    product: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def flash_attention(
    q_BTHN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    segments_BT: jax.Array,
    branches_BT: jax.Array,
    platform: Platform,
) -> jax.Array:
    """`attention.packed_attention` by a platform's kernels; on a CPU they are interpreted, to be looked at.

    Any number of heads; `backends` knows the limits of width and length. Products take q, k and v in their dtype, all
    else is float32. A query that sees nothing, padding, returns 0.
    """
    return _forward(q_BTHN, k_BTKN, v_BTKN, segments_BT, branches_BT, platform)[0]


def _forward(
    q_BTHN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    segments_BT: jax.Array,
    branches_BT: jax.Array,
    platform: Platform,
) -> tuple[jax.Array, tuple[Blocks, jax.Array, jax.Array]]:
    q, k, v = (_heads_first(x, platform) for x in (q_BTHN, k_BTKN, v_BTKN))
    x = Blocks(q, k, v, _filled(jnp.stack([segments_BT, branches_BT], axis=1), 2, BLOCK[platform]))
    B, H, T, _ = q.shape
    out, normal_BH1T = Grid(platform, B, H, k.shape[1], T).call(
        "flash_attend",
        functools.partial(_attend, q_BTHN.shape[-1] ** -0.5),
        _visiting(x, platform),
        [("bhc:", q), ("bh:c", jax.ShapeDtypeStruct((B, H, 1, T), jnp.float32))],
        flops=2 * q.size * T,
    )
    return _heads_last(out, *q_BTHN.shape[1::2]), (x, out, normal_BH1T)


def _backward(
    platform: Platform, kept: tuple[Blocks, jax.Array, jax.Array], grad_BTHN: jax.Array
) -> tuple[jax.Array | None, ...]:
    x, out, normal_BH1T = kept
    grad, scale = _heads_first(grad_BTHN, platform), grad_BTHN.shape[-1] ** -0.5
    said = Said(grad, normal_BH1T, (grad.astype(jnp.float32) * out).sum(-1)[:, :, None])
    grads = _queries_gradient(x, said, platform, scale), *_keys_gradients(x, said, platform, scale)
    return *(_heads_last(one, *grad_BTHN.shape[1::2]) for one in grads), None, None


def _visiting(x: Blocks, platform: Platform) -> list[tuple[str, jax.Array]]:
    """A block of queries, and the keys that it visits (for the letters, `Grid.call`)."""
    return [("bi::", visits(x.ids, BLOCK[platform])), ("b::", x.ids), ("bhc:", x.q), ("bk::", x.k), ("bk::", x.v)]


def _queries_gradient(x: Blocks, said: Said, platform: Platform, scale: float) -> jax.Array:
    B, H, T, _ = x.q.shape
    (dq,) = Grid(platform, B, H, x.k.shape[1], T).call(
        "flash_grad_queries",
        functools.partial(_grad_queries, scale),
        [*_visiting(x, platform), ("bhc:", said.grad), ("bh:c", said.normal), ("bh:c", said.product)],
        [("bhc:", x.q)],
        flops=3 * x.q.size * T,
    )
    return dq


def _keys_gradients(x: Blocks, said: Said, platform: Platform, scale: float) -> tuple[jax.Array, jax.Array]:
    """A program sums over as many of a key head's query heads as it can look at, and what remains is summed here."""
    (B, H, T, N), K = x.q.shape, x.k.shape[1]
    g = heads_at_once(platform, H // K, T, N, x.q.dtype.itemsize)
    part = jax.ShapeDtypeStruct((B, H // g, T, N), x.k.dtype if H // g == K else jnp.float32)
    by_query = [("bh:::", y.reshape(B, H // g, g, *y.shape[2:])) for y in (x.q, *said)]
    parts = Grid(platform, B, H // g, K, T).call(
        "flash_grad_keys",
        functools.partial(_grad_keys, scale),
        [("bi::", visitors(x.ids, BLOCK[platform])), ("b::", x.ids), ("bkc:", x.k), ("bkc:", x.v), *by_query],
        [("bhc:", part), ("bhc:", part)],
        flops=4 * x.q.size * T,
    )
    dk, dv = (y.reshape(B, K, -1, T, N).sum(2).astype(x.k.dtype) for y in parts)
    return dk, dv


flash_attention.defvjp(_forward, _backward)


def _attend(scale: float, i: Any, visits: Ref, ids: Ref, q: Ref, k: Ref, v: Ref, out: Ref, normal: Ref) -> None:
    """Out [c, N] of a block of queries, and the logarithm of the sum that its weights are divided by, [1, c]."""
    c, q_cN = len(q), q[...]
    queries = _upright(_columns(ids, i, c))

    def visit(turn: Any, seen: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        value, total, top = seen
        j = visits[0, 1 + turn]
        score = _product(q_cN, k[_span(j, c)], 1, 1) * scale
        score = jnp.where(sees(queries, _columns(ids, j, c)), score, NEGATIVE)
        higher = jnp.maximum(top, score.max(-1, keepdims=True))
        weight, fade = _weight(score, higher), jnp.exp(top - higher)
        added = _product(weight.astype(v.dtype), v[_span(j, c)], 1, 0)
        return value * fade + added, total * fade + weight.sum(-1, keepdims=True), higher

    zero_c1 = jnp.zeros((c, 1), jnp.float32)
    value, total, top = lax.fori_loop(
        0, visits[0, 0], visit, (jnp.zeros(q.shape, jnp.float32), zero_c1, zero_c1 + NEGATIVE)
    )
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out[...] = (value / total).astype(out.dtype)
    normal[...] = jnp.where(some, top + jnp.log(total), 0.0).T


def _grad_queries(
    scale: float, i: Any, visits: Ref, ids: Ref, q: Ref, k: Ref, v: Ref, grad: Ref, normal: Ref, product: Ref, dq: Ref
) -> None:
    c, q_cN, grad_cN = len(q), q[...], grad[...]
    queries, normal_c1, product_c1 = _upright(_columns(ids, i, c)), normal[...].T, product[...].T

    def visit(turn: Any, sum_cN: jax.Array) -> jax.Array:
        j = visits[0, 1 + turn]
        k_cN = k[_span(j, c)]
        score = _product(q_cN, k_cN, 1, 1) * scale
        weight = _weight(jnp.where(sees(queries, _columns(ids, j, c)), score, NEGATIVE), normal_c1)
        toward = weight * (_product(grad_cN, v[_span(j, c)], 1, 1) - product_c1)
        return sum_cN + _product(toward.astype(k.dtype), k_cN, 1, 0)

    sum_cN = lax.fori_loop(0, visits[0, 0], visit, jnp.zeros(q.shape, jnp.float32))
    dq[...] = (sum_cN * scale).astype(dq.dtype)


def _grad_keys(
    scale: float,
    j: Any,
    visitors: Ref,
    ids: Ref,
    k: Ref,
    v: Ref,
    q: Ref,
    grad: Ref,
    normal: Ref,
    product: Ref,
    dk: Ref,
    dv: Ref,
) -> None:
    """Keys stand upright here: weights are [keys, queries]. q and grad [G, T, N], normal and product [G, 1, T]."""
    c, k_cN, v_cN = len(k), k[...], v[...]
    keys = _upright(_columns(ids, j, c))

    def visit(g: Any, turn: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i = visitors[0, 1 + turn]
        at = _span(i, c)
        q_cN, grad_cN = q[g, at], grad[g, at]
        score = _product(k_cN, q_cN, 1, 1) * scale
        weight = _weight(jnp.where(sees(_columns(ids, i, c), keys), score, NEGATIVE), normal[g, :, at])
        toward = weight * (_product(v_cN, grad_cN, 1, 1) - product[g, :, at])
        add = lambda so_far, x, y: so_far + _product(x.astype(y.dtype), y, 1, 0)
        return add(sums[0], toward, q_cN), add(sums[1], weight, grad_cN)

    def head(g: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return lax.fori_loop(0, visitors[0, 0], functools.partial(visit, g), sums)

    zero_cN = jnp.zeros(k.shape, jnp.float32)
    sum_k, sum_v = lax.fori_loop(0, len(q), head, (zero_cN, zero_cN))
    dk[...], dv[...] = (sum_k * scale).astype(dk.dtype), sum_v.astype(dv.dtype)


def _weight(score: jax.Array, relative_to: jax.Array) -> jax.Array:
    """exp, and 0 for the scores that are masked, also where all are."""
    return jnp.exp(jnp.where(score > NEGATIVE / 2, score - relative_to, NEGATIVE))


def _product(x: jax.Array, y: jax.Array, of_x: int, of_y: int) -> jax.Array:
    return lax.dot_general(x, y, (((of_x,), (of_y,)), ((), ())), preferred_element_type=jnp.float32)


def _span(block: Any, c: int) -> Any:
    return pl.ds(pl.multiple_of(block * c, c), c)


def _columns(ids: Ref, block: Any, c: int) -> Columns:
    """Of a block, each [1, c]."""
    number = block * c + lax.broadcasted_iota(jnp.int32, (1, c), 1)
    return Columns(number, ids[0:1, _span(block, c)], ids[1:2, _span(block, c)])


def _upright(columns: Columns) -> Columns:
    return Columns(*(x.T for x in columns))


def _heads_first(x_BTHN: jax.Array, platform: Platform) -> jax.Array:
    """[B, H, T', N'] with lengths that the kernels take, filled up with 0."""
    x = _filled(x_BTHN.swapaxes(1, 2), 2, BLOCK[platform])
    # Triton's arrays have powers of two as sizes, and its products at least 16.
    return _filled(x, 3, max(16, pl.next_power_of_2(x.shape[3]))) if platform == "gpu" else x


def _heads_last(x_BHTN: jax.Array, T: int, N: int) -> jax.Array:
    """Undoes `_heads_first`."""
    return x_BHTN[:, :, :T, :N].swapaxes(1, 2)


def _filled(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    widths = [(0, -size % multiple if n == axis else 0) for n, size in enumerate(x.shape)]
    return jnp.pad(x, widths)
