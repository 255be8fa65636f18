"""Attention of grouped queries over head-major keys, and the mask of packed rows.

B batch, T queries, C keys (cache columns), H query heads, K key/value heads, N per-head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

NEGATIVE = -1e30  # finite, so that a row that sees nothing stays finite
QUERY_CHUNK = 512


def attend(q_BTHN: jax.Array, k_BKCN: jax.Array, v_BKCN: jax.Array, mask_BTC: jax.Array) -> jax.Array:
    """softmax(q·k/√N) v with a boolean mask; scores and softmax in float32. A query that sees no key returns 0."""
    B, T, H, N = q_BTHN.shape
    K = k_BKCN.shape[1]
    q_BTKGN = q_BTHN.reshape(B, T, K, H // K, N)
    score = jnp.einsum("btkgn,bkcn->bkgtc", q_BTKGN, k_BKCN, preferred_element_type=jnp.float32) * N**-0.5
    mask = mask_BTC[:, None, None]
    score = jnp.where(mask, score, NEGATIVE)
    weight = jnp.exp(score - lax.stop_gradient(score.max(-1, keepdims=True))) * mask
    weight = weight / jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)
    return jnp.einsum("bkgtc,bkcn->btkgn", weight.astype(v_BKCN.dtype), v_BKCN).reshape(B, T, H, N)


def packed_mask(query_T: jax.Array, segments_BT: jax.Array, branches_BT: jax.Array) -> jax.Array:
    """Who sees whom in packed rows, bool [B, len(query_T), T] for the query columns `query_T`.

    A token sees the columns up to its own that lie in its segment and belong to the segment's trunk (branch 0) or to
    its own branch. Segment 0 is padding: it sees nothing and nothing sees it.
    """
    segment, branch = (
        jnp.take(segments_BT, query_T, axis=1)[..., None],
        jnp.take(branches_BT, query_T, axis=1)[..., None],
    )
    column = jnp.arange(segments_BT.shape[1])
    causal = column[None, None, :] <= query_T[None, :, None]
    same = (segment == segments_BT[:, None]) & (segment > 0)
    return causal & same & ((branches_BT[:, None] == 0) | (branch == branches_BT[:, None]))


def packed_attention(
    q_BTHN: jax.Array, k_BTKN: jax.Array, v_BTKN: jax.Array, segments_BT: jax.Array, branches_BT: jax.Array
) -> jax.Array:
    """Causal attention inside packed rows; long rows go through a loop over blocks of queries, [T, T] never exists."""
    k, v = k_BTKN.swapaxes(1, 2), v_BTKN.swapaxes(1, 2)
    T = q_BTHN.shape[1]

    def block(start: jax.Array | int, size: int) -> jax.Array:
        query = start + jnp.arange(size)
        mask = packed_mask(query, segments_BT, branches_BT)
        return attend(lax.dynamic_slice_in_dim(q_BTHN, start, size, axis=1), k, v, mask)

    if T <= QUERY_CHUNK or T % QUERY_CHUNK:
        return block(0, T)
    out = lax.map(
        lambda start: jax.checkpoint(block, static_argnums=1)(start, QUERY_CHUNK), jnp.arange(0, T, QUERY_CHUNK)
    )
    return jnp.moveaxis(out, 0, 1).reshape(q_BTHN.shape)
