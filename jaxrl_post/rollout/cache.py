"""Keys and values of a rollout, and attention over them. A prompt is kept once, however many samples continue it.

The prompts' part is written by prefill and read by every slot whose row it is. The responses' part has one column for
each decode step: all slots write the same column, so a step writes a slice of the cache in place and no scatter. Rotary
phases are in the keys, so the order of columns means nothing; a slot that has sampled n tokens sees the last n columns.

Layers that are unrolled (on a CPU) have a cache each. Their responses are kept in chunks of columns: a step that reads
the first columns alone reads whole arrays, where a slice of one would be a copy. Their keys have columns last, values
their head width: both products then run along contiguous memory (2 to 5 times as fast as keys with the width last).

Layers that are scanned (on accelerators) share one cache with a leading L, of which each reads a slice. Responses are
one array, read up to any column, and keys have the width last as values do.

L layers of a run, U prompt rows, W prompt columns, S slots, C columns of a chunk, K key/value heads, G query heads for
each (H = K·G), N per-head width, M prompts of a prefill, B columns of a prefill piece.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_post.models.attention import NEGATIVE
from jaxrl_post.models.config import ModelConfig


class KeysValues(NamedTuple):
    """Rows are prompts or slots. Of one layer: k [rows, K, N, columns] and v [rows, K, columns, N]. Of scanned layers
    both are [L, rows, K, columns, N]."""

    k: jax.Array
    v: jax.Array

    @property
    def columns(self) -> int:
        return self.v.shape[-2]


class Cache(NamedTuple):
    """Prompts [U, …, W] and chunks of responses [S, …, C]."""

    prompts: KeysValues
    responses: tuple[KeysValues, ...]


Caches = Cache | tuple[Cache, ...]  # of scanned layers, or one for each of unrolled layers


def empty_cache(
    config: ModelConfig, unrolled: bool, prompts: int, width: int, slots: int, chunks: Sequence[int]
) -> Caches:
    """Zeros. `chunks` are the response columns of each chunk, which scanned layers have in one array."""
    zeros = lambda *shape: jnp.zeros(shape, config.dtype)

    def of_layer(rows: int, columns: int) -> KeysValues:
        outer = (rows, config.kv_heads)
        return KeysValues(zeros(*outer, config.head_dim, columns), zeros(*outer, columns, config.head_dim))

    def of_all(rows: int, columns: int) -> KeysValues:
        shape = (config.layers, rows, config.kv_heads, columns, config.head_dim)
        return KeysValues(zeros(*shape), zeros(*shape))

    if unrolled:
        return (Cache(of_layer(prompts, width), tuple(of_layer(slots, columns) for columns in chunks)),) * config.layers
    return Cache(of_all(prompts, width), (of_all(slots, sum(chunks)),) if chunks else ())


def pack(cache: Caches, slot_S: jax.Array) -> Caches:
    """The cache of these slots, in this order; prompts stay.

    Of unrolled layers it holds these slots alone, its first two chunks joined. Of scanned layers they are moved to the
    first rows, a layer at a time, so that a second cache never exists.
    """

    def packed(layer: Cache) -> Cache:
        kept = jax.tree.map(lambda x: jnp.take(x, slot_S, axis=0), layer.responses)
        if len(kept) > 1:
            (a, b), rest = kept[:2], kept[2:]
            kept = (KeysValues(jnp.concatenate([a.k, b.k], -1), jnp.concatenate([a.v, b.v], -2)), *rest)
        return layer._replace(responses=kept)

    def moved(x: jax.Array) -> jax.Array:
        move = lambda i, x: lax.dynamic_update_slice(x, x[i, slot_S][None], _at(x, i))
        return lax.fori_loop(0, len(x), move, x)

    if isinstance(cache, Cache):
        return cache._replace(responses=jax.tree.map(moved, cache.responses))
    return tuple(packed(layer) for layer in cache)


def chunk_ends(cache: Caches) -> list[int]:
    """Response columns up to the end of each chunk."""
    one = cache if isinstance(cache, Cache) else cache[0]
    return list(itertools.accumulate(chunk.columns for chunk in one.responses))


def key_axis(i: jax.Array | None) -> int:
    """Where keys [rows, K, …] of a layer have their columns; values have them in axis 2. `i` is None unless scanned."""
    return 3 if i is None else 2


def laid_out(k_RBKN: jax.Array, v_RBKN: jax.Array, i: jax.Array | None) -> KeysValues:
    """Keys and values of B tokens as a layer keeps them."""
    v_RKBN = v_RBKN.swapaxes(1, 2)
    return KeysValues(k_RBKN.transpose(0, 2, 3, 1) if i is None else k_RBKN.swapaxes(1, 2), v_RKBN)


def rows_of(kept: KeysValues, i: jax.Array | None, row_R: jax.Array) -> KeysValues:
    """Some rows of a layer."""
    return jax.tree.map(lambda x: x[row_R] if i is None else x[i, row_R], kept)


def first_of(kept: KeysValues, i: jax.Array | None, rows: int, columns: int) -> KeysValues:
    """The first rows and columns of a layer."""

    def first(x: jax.Array, axis: int) -> jax.Array:
        if i is None:
            return lax.slice_in_dim(x[:rows], 0, columns, axis=axis)
        return lax.dynamic_slice(x, _at(x, i), (1, rows, x.shape[2], columns, x.shape[4]))[0]

    return KeysValues(first(kept.k, key_axis(i)), first(kept.v, 2))


def set_columns(
    kept: KeysValues, i: jax.Array | None, row: jax.Array, column: jax.Array, k: jax.Array, v: jax.Array
) -> KeysValues:
    """Tokens' keys and values [..., K, N] written at rows and columns [...]; those out of range are dropped."""
    layer, heads = () if i is None else (i,), slice(None)
    at_value = (*layer, row, heads, column)
    at_key = (row, heads, heads, column) if i is None else at_value
    return KeysValues(kept.k.at[at_key].set(k, mode="drop"), kept.v.at[at_value].set(v, mode="drop"))


def attend_prompt(
    start: jax.Array,
    row_M: jax.Array,
    cache: Cache,
    i: jax.Array | None,
    q_MBHN: jax.Array,
    k_MBKN: jax.Array,
    v_MBKN: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Attention of columns start … start+B-1 of some prompts to their own columns up to each; writes theirs first.

    What lies beyond a prompt's length is seen by nothing but what lies beyond it. A row of U (out of range) writes
    nothing.
    """
    B, H, K, W = *q_MBHN.shape[1:3], k_MBKN.shape[2], cache.prompts.columns
    new, old = laid_out(k_MBKN, v_MBKN, i), rows_of(cache.prompts, i, row_M)
    k = lax.dynamic_update_slice_in_dim(old.k, new.k, start, key_axis(i))
    v_MKWN = lax.dynamic_update_slice_in_dim(old.v, new.v, start, axis=2)
    put = lambda x, rows: (x.at[row_M] if i is None else x.at[i, row_M]).set(rows, mode="drop")
    cache = cache._replace(prompts=jax.tree.map(put, cache.prompts, KeysValues(k, v_MKWN)))
    seen_BW = jnp.arange(W)[None] <= start + jnp.arange(B)[:, None]
    mask_XW = jnp.repeat(seen_BW, H // K, axis=0)
    return attend_heads(q_MBHN, [(k, v_MKWN, mask_XW[None, None])], key_axis(i)), cache


class Step(NamedTuple):
    """What a decode step sees, the same in every layer: the last of `masks` is of the chunk it writes, at `column`.

    row_S: each slot's prompt, None where the slots are whole groups in the order of the prompt rows; prompt_mask_SW;
    masks: [S, C] for each chunk up to the one written.
    """

    row_S: jax.Array | None
    prompt_mask_SW: jax.Array
    masks: tuple[jax.Array, ...]
    column: jax.Array


def decode_step(
    cache: Caches,
    end: int,
    clock: jax.Array,
    row_S: jax.Array | None,
    length_S: jax.Array,
    sampled_S: jax.Array,
) -> Step:
    """The step that writes column `clock`, counted round and round, and reads the response columns before `end`.

    The column must be one of these and in the last chunk that they reach. Slots see the prompt of `length_S` tokens in
    `row_S` and the last `sampled_S` columns, none of them beyond `end`.
    """
    one, bounds = (cache if isinstance(cache, Cache) else cache[0]), [0, *chunk_ends(cache)]
    column = clock % bounds[-1]
    prompt_mask_SW = jnp.arange(one.prompts.columns)[None] < length_S[:, None]
    read = [(first, min(last, end)) for first, last in itertools.pairwise(bounds) if first < end]
    ages = [(column - jnp.arange(*columns)) % bounds[-1] for columns in read]
    return Step(row_S, prompt_mask_SW, tuple(age_C[None] < sampled_S[:, None] for age_C in ages), column - read[-1][0])


def attend_cache(
    step: Step, cache: Cache, i: jax.Array | None, q_S1HN: jax.Array, k_S1KN: jax.Array, v_S1KN: jax.Array
) -> tuple[jax.Array, Cache]:
    """Attention of every slot's token to its prompt and to the response so far; writes the token's column first."""
    S = len(q_S1HN)
    cache = write_column(cache, i, step.column, k_S1KN, v_S1KN, chunk=len(step.masks) - 1)
    of_prompts = cache.prompts
    prompts = (
        first_of(of_prompts, i, of_prompts.v.shape[-4], of_prompts.columns)
        if step.row_S is None
        else rows_of(of_prompts, i, step.row_S)
    )
    responses = [
        first_of(kept, i, S, mask_SC.shape[1]) for kept, mask_SC in zip(cache.responses, step.masks, strict=False)
    ]
    masks = (step.prompt_mask_SW, *step.masks)
    parts = [(x.k, x.v, mask_SC[:, None, None]) for x, mask_SC in zip((prompts, *responses), masks, strict=True)]
    return attend_heads(q_S1HN, parts, key_axis(i)), cache


def write_column(
    cache: Cache, i: jax.Array | None, column: jax.Array, k_S1KN: jax.Array, v_S1KN: jax.Array, chunk: int = 0
) -> Cache:
    """The first slots' token written at a column of a chunk, in every one of them."""
    new, old, chunks = laid_out(k_S1KN, v_S1KN, i), cache.responses[chunk], cache.responses
    written = KeysValues(_write(old.k, new.k, i, column, key_axis(i)), _write(old.v, new.v, i, column, axis=2))
    return cache._replace(responses=(*chunks[:chunk], written, *chunks[chunk + 1 :]))


def _write(x: jax.Array, new: jax.Array, i: jax.Array | None, column: jax.Array, axis: int) -> jax.Array:
    """A column of the first rows of a layer."""
    if i is None:
        return lax.dynamic_update_slice_in_dim(x, new, column, axis)
    return lax.dynamic_update_slice(x, new[None], _at(x, i, {1 + axis: column}))


def _at(x: jax.Array, i: jax.Array, others: Mapping[int, jax.Array] = {}) -> list[jax.Array]:
    """Indices of layer `i` of a stack, 0 in the axes that `others` does not give."""
    return [i, *(others.get(axis, jnp.int32(0)) for axis in range(1, x.ndim))]


Part = tuple[jax.Array, jax.Array, jax.Array]


def attend_heads(q_RBHN: jax.Array, parts: Sequence[Part], key_axis: int) -> jax.Array:
    """`attend_parts` of B tokens a row; its queries X are the heads of all tokens that read the same keys, by token."""
    (R, B, H, N), K = q_RBHN.shape, parts[0][0].shape[1]
    q_RKXN = q_RBHN.reshape(R, B, K, H // K, N).swapaxes(1, 2).reshape(R, K, -1, N)
    return attend_parts(q_RKXN, parts, key_axis).reshape(R, K, B, H // K, N).swapaxes(1, 2).reshape(R, B, H, N)


def attend_parts(q_RKXN: jax.Array, parts: Sequence[Part], key_axis: int) -> jax.Array:
    """softmax(q·k/√N) v with one softmax over all parts (k, v [r, K, C, N], mask), in float32.

    Keys are [r, K, N, C] where their `key_axis` is 3, else [r, K, C, N]. Where there are fewer rows of keys than of
    queries, neighbouring queries share them: one product for the R / r of a row. Every query sees at least one key.
    """

    def product(pattern: str, x_RKXY: jax.Array, keys: jax.Array) -> jax.Array:
        R, K, X, Y = x_RKXY.shape
        if len(keys) == R:
            return jnp.einsum(pattern, x_RKXY, keys, preferred_element_type=jnp.float32)
        shared = x_RKXY.reshape(len(keys), -1, K, X, Y).swapaxes(1, 2).reshape(len(keys), K, -1, Y)
        out = jnp.einsum(pattern, shared, keys, preferred_element_type=jnp.float32)
        return out.reshape(len(keys), K, -1, X, out.shape[-1]).swapaxes(1, 2).reshape(R, K, X, -1)

    scale = q_RKXN.shape[-1] ** -0.5
    pattern = "rkxn,rknc->rkxc" if key_axis == 3 else "rkxn,rkcn->rkxc"
    scores = [jnp.where(mask, product(pattern, q_RKXN, k) * scale, NEGATIVE) for k, _, mask in parts]
    peak = functools.reduce(jnp.maximum, [s.max(-1, keepdims=True) for s in scores])
    weights = [jnp.exp(s - peak) for s in scores]
    total = functools.reduce(jnp.add, [w.sum(-1, keepdims=True) for w in weights])
    values = [product("rkxc,rkcn->rkxn", w.astype(v.dtype), v) for w, (_, v, _) in zip(weights, parts, strict=True)]
    return (functools.reduce(jnp.add, values) / total).astype(q_RKXN.dtype)
