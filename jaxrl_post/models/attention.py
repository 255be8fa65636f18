"""Attention of grouped queries over head-major keys, and the mask of packed rows.

B batch, T queries, C keys (cache columns), H query heads, K key/value heads, G query heads of a key head, N per-head
width, X queries of a key head: G by T.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

NEGATIVE = -1e30  # finite, so that a row that sees nothing stays finite
QUERY_CHUNK = 512
SHORTEST_QUARTERED = 128


def attend(q_BKGTN: jax.Array, k_BKCN: jax.Array, v_BKCN: jax.Array, mask_BTC: jax.Array) -> jax.Array:
    """softmax(q·k/√N) v with a boolean mask, [B, K, G, T, N]; scores and softmax in float32. A query that sees no key
    returns 0.

    Queries lie by key head, so that both products are plain ones per key head. The mask is added to the scores and the
    sum divides the values, not the weights: each is a pass less over [T, C].
    """
    B, K, G, T, N = q_BKGTN.shape
    q_BKXN, C = q_BKGTN.reshape(B, K, G * T, N), k_BKCN.shape[2]
    score_BKXC = jnp.einsum("bkxn,bkcn->bkxc", q_BKXN, k_BKCN, preferred_element_type=jnp.float32) * N**-0.5
    unseen_BTC = jnp.where(mask_BTC, 0.0, NEGATIVE)
    score = score_BKXC.reshape(B, K, G, T, C) + unseen_BTC[:, None, None]
    weight = jnp.exp(score - lax.stop_gradient(score.max(-1, keepdims=True)))
    scale = mask_BTC.any(-1)[:, None, None] / weight.sum(-1)
    weight_BKXC = weight.reshape(B, K, G * T, C).astype(v_BKCN.dtype)
    sum_BKXN = jnp.einsum("bkxc,bkcn->bkxn", weight_BKXC, v_BKCN, preferred_element_type=jnp.float32)
    return (sum_BKXN.reshape(B, K, G, T, N) * scale[..., None]).astype(v_BKCN.dtype)


def _by_key_head(q_BTHN: jax.Array, K: int) -> jax.Array:
    """[B, K, H/K, T, N]."""
    B, T, H, N = q_BTHN.shape
    return q_BTHN.reshape(B, T, K, H // K, N).transpose(0, 2, 3, 1, 4)


def _heads_last(x_BKGTN: jax.Array) -> jax.Array:
    """`_by_key_head` undone."""
    B, K, G, T, N = x_BKGTN.shape
    return x_BKGTN.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, N)


class Columns(NamedTuple):
    """Of some columns of packed rows: their numbers int [C], and segments and branches int [B, C]."""

    number: Any
    segments: Any
    branches: Any


def visible(queries: Columns, keys: Columns) -> jax.Array:
    """Who sees whom in packed rows, bool [B, queries, keys], as `sees`."""
    of_queries = Columns(queries.number[None, :, None], queries.segments[..., None], queries.branches[..., None])
    return sees(of_queries, Columns(keys.number[None, None], keys.segments[:, None], keys.branches[:, None]))


def sees(queries: Columns, keys: Columns) -> jax.Array:
    """Whether each query sees each key: bool, of arrays that broadcast.

    A token sees the columns up to its own that lie in its segment and belong to the segment's trunk (branch 0) or to
    its own branch. Segment 0 is padding: it sees nothing and nothing sees it.
    """
    causal = keys.number <= queries.number
    same = (queries.segments == keys.segments) & (queries.segments > 0)
    return causal & same & ((keys.branches == 0) | (queries.branches == keys.branches))


def packed_attention(
    q_BTHN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    segments_BT: jax.Array,
    branches_BT: jax.Array,
    keep: bool = True,
) -> jax.Array:
    """Causal attention inside packed rows.

    Rows go through in quarters of queries, each with the keys up to its end: 5/8 of the pairs. Long ones go through a
    loop over blocks of queries with all keys, so that [T, T] never exists. `keep`: the backward pass of short rows
    reads the weights, [T, C] for each head, and does not make them again.
    """
    k, v = k_BTKN.swapaxes(1, 2), v_BTKN.swapaxes(1, 2)
    T, q_BKGTN = q_BTHN.shape[1], _by_key_head(q_BTHN, k.shape[1])

    def block(q_BKGtN: jax.Array, start: jax.Array | int, seen: int) -> jax.Array:
        size = q_BKGtN.shape[3]
        cut = lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1)
        queries = Columns(start + jnp.arange(size), cut(segments_BT), cut(branches_BT))
        keys = Columns(jnp.arange(seen), segments_BT[:, :seen], branches_BT[:, :seen])
        return attend(q_BKGtN, k[:, :, :seen], v[:, :, :seen], visible(queries, keys))

    if T <= QUERY_CHUNK or T % QUERY_CHUNK:
        ends = [0, T] if T < SHORTEST_QUARTERED else [T * part // 4 for part in range(5)]
        spans = list(itertools.pairwise(ends))
        attended = block if keep else jax.checkpoint(block, static_argnums=(1, 2), prevent_cse=False)
        # Gradients of a split are joined; those of slices are padded and summed.
        parts = lax.split(q_BKGTN, [end - start for start, end in spans], axis=3)
        blocks = [attended(part, start, end) for part, (start, end) in zip(parts, spans, strict=True)]
        return _heads_last(jnp.concatenate(blocks, axis=3))

    @jax.checkpoint
    def chunk(start: jax.Array) -> jax.Array:
        return block(lax.dynamic_slice_in_dim(q_BKGTN, start, QUERY_CHUNK, axis=3), start, T)

    out = lax.map(chunk, jnp.arange(0, T, QUERY_CHUNK))
    return _heads_last(jnp.moveaxis(out, 0, 3).reshape(q_BKGTN.shape))
