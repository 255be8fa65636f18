"""Keys and values of sequences that start, wait and go on at any time: a row for each slot, a column for each position.

The in-graph engine's slots all write one column a step, which only sequences that never pause can share. Here every row
writes at its own length. Pieces of a prompt or of appended text go through `cache.attend_prompt`, with slots for rows.

S slots, W columns of a row, C columns read, K key/value heads, G query heads for each (H = K·G), N per-head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.rollout import cache as caches
from jaxrl_post.rollout.cache import Cache

Caches = Cache | tuple[Cache, ...]


def empty_rows(config: ModelConfig, unrolled: bool, rows: int, columns: int) -> Caches:
    """`rows` rows of `columns` columns, for each layer or with a leading L."""
    return caches.empty_cache(config, unrolled, rows, columns, rows, ())


def attend_rows(
    length_S: jax.Array,
    running_S: jax.Array,
    columns: int,
    cache: Cache,
    i: jax.Array | None,
    q_S1HN: jax.Array,
    k_S1KN: jax.Array,
    v_S1KN: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Attention of one token a slot to the `length_S` columns before it and its own; writes its column first.

    Only the first `columns` columns are read. A slot that is not running writes nothing.
    """
    S, old = len(length_S), cache.prompts
    column_S = jnp.where(running_S, length_S, old.columns)
    kept = caches.set_columns(old, i, jnp.arange(S), column_S, k_S1KN[:, 0], v_S1KN[:, 0])
    mask_SC = jnp.arange(columns)[None] <= length_S[:, None]
    part = (*caches.first_of(kept, i, S, columns), mask_SC[:, None, None])
    return caches.attend_heads(q_S1HN, [part], caches.key_axis(i)), cache._replace(prompts=kept)


def copy_row(cache: Caches, prefix: Caches, row: jax.Array, mine: jax.Array) -> Caches:
    """The first columns of `row` from the one row of `prefix`, where `mine`."""

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        at = [jnp.int32(0)] * x.ndim
        at[x.ndim - 4] = row
        return lax.dynamic_update_slice(x, jnp.where(mine, new, lax.dynamic_slice(x, at, new.shape)), at)

    return jax.tree.map(put, cache, prefix)
