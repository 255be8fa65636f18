"""Keys and values of a rollout, and attention over them. A prompt is kept once, however many samples continue it.

The prompts' part is written by prefill and read by every slot whose row it is. The responses' part has one column for
each decode step: all slots write the same column, so a step writes a slice of the cache in place and no scatter. Rotary
phases are in the keys, so the order of columns means nothing; a slot that has sampled n tokens sees the last n columns.

Responses are kept in chunks of columns, each an array by itself: a step that reads the first columns alone reads whole
arrays, where a slice of one would be a copy. Keys have their columns last and values their head width: on a CPU both
products then run along contiguous memory (2 to 5 times as fast as keys with the width last).

L layers of a run, U prompt rows, W prompt columns, S slots, C columns of a chunk, K key/value heads, G query heads for
each (H = K·G), N per-head width, M prompts of a prefill, B columns of a prefill piece.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_post.models.attention import NEGATIVE
from jaxrl_post.models.config import ModelConfig


class KeysValues(NamedTuple):
    """k [rows, K, N, columns] and v [rows, K, columns, N]; rows are prompts or slots."""

    k: jax.Array
    v: jax.Array


class Cache(NamedTuple):
    """Prompts [U, …, W] and chunks of responses [S, …, C]."""

    prompts: KeysValues
    responses: tuple[KeysValues, ...]


Caches = Cache | tuple[Cache, ...]  # of scanned layers, or one for each of unrolled layers


def empty_cache(
    config: ModelConfig, unrolled: bool, prompts: int, width: int, slots: int, chunks: Sequence[int]
) -> Caches:
    def empty(rows: int, columns: int) -> KeysValues:
        outer = (rows, config.kv_heads) if unrolled else (config.layers, rows, config.kv_heads)
        zeros = lambda *shape: jnp.zeros(shape, config.dtype)
        return KeysValues(zeros(*outer, config.head_dim, columns), zeros(*outer, columns, config.head_dim))

    caches = [Cache(empty(prompts, width), tuple(empty(slots, columns) for columns in chunks))]
    return tuple(caches * config.layers) if unrolled else caches[0]


def pack(cache: Caches, slot_S: jax.Array) -> Caches:
    """The cache of these slots alone, in this order, its first two chunks joined; prompts stay."""

    def packed(layer: Cache) -> Cache:
        kept = jax.tree.map(lambda x: jnp.take(x, slot_S, axis=x.ndim - 4), layer.responses)
        if len(kept) > 1:
            (a, b), rest = kept[:2], kept[2:]
            kept = (KeysValues(jnp.concatenate([a.k, b.k], -1), jnp.concatenate([a.v, b.v], -2)), *rest)
        return layer._replace(responses=kept)

    return packed(cache) if isinstance(cache, Cache) else tuple(packed(layer) for layer in cache)


def chunk_ends(cache: Caches) -> list[int]:
    """Response columns up to the end of each chunk."""
    one = cache if isinstance(cache, Cache) else cache[0]
    return list(itertools.accumulate(chunk.k.shape[-1] for chunk in one.responses))


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
    B, H, K, W = *q_MBHN.shape[1:3], k_MBKN.shape[2], cache.prompts.k.shape[-1]
    at = lambda x: x[row_M] if i is None else x[i, row_M]
    put = lambda x, new: (x.at[row_M] if i is None else x.at[i, row_M]).set(new, mode="drop")
    old = cache.prompts
    k_MKNW = lax.dynamic_update_slice_in_dim(at(old.k), k_MBKN.transpose(0, 2, 3, 1), start, axis=3)
    v_MKWN = lax.dynamic_update_slice_in_dim(at(old.v), v_MBKN.swapaxes(1, 2), start, axis=2)
    cache = cache._replace(prompts=KeysValues(put(old.k, k_MKNW), put(old.v, v_MKWN)))
    seen_BW = jnp.arange(W)[None] <= start + jnp.arange(B)[:, None]
    mask_XW = jnp.repeat(seen_BW, H // K, axis=0)
    return attend_heads(q_MBHN, [(k_MKNW, v_MKWN, mask_XW[None, None])]), cache


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
    tier: int,
    clock: jax.Array,
    row_S: jax.Array | None,
    length_S: jax.Array,
    sampled_S: jax.Array,
) -> Step:
    """The step that writes column `clock`, counted round and round, which must lie in chunk `tier`.

    Slots see the prompt of `length_S` tokens in `row_S` and the last `sampled_S` columns, none of them beyond the tier.
    """
    one, bounds = (cache if isinstance(cache, Cache) else cache[0]), [0, *chunk_ends(cache)]
    column = clock % bounds[-1]
    prompt_mask_SW = jnp.arange(one.prompts.k.shape[-1])[None] < length_S[:, None]
    ages = [(column - jnp.arange(*ends)) % bounds[-1] for ends in itertools.pairwise(bounds[: tier + 2])]
    return Step(row_S, prompt_mask_SW, tuple(age_C[None] < sampled_S[:, None] for age_C in ages), column - bounds[tier])


def attend_cache(
    step: Step, cache: Cache, i: jax.Array | None, q_S1HN: jax.Array, k_S1KN: jax.Array, v_S1KN: jax.Array
) -> tuple[jax.Array, Cache]:
    """Attention of every slot's token to its prompt and to the response so far; writes the token's column first."""
    written = len(step.masks) - 1
    of_layer = lambda x: x if i is None else x[i]
    old = cache.responses[written]
    chunk = KeysValues(
        _write(old.k, k_S1KN.transpose(0, 2, 3, 1), i, step.column, axis=3),
        _write(old.v, v_S1KN.swapaxes(1, 2), i, step.column, axis=2),
    )
    cache = cache._replace(responses=(*cache.responses[:written], chunk, *cache.responses[written + 1 :]))
    mask = lambda mask_SC: mask_SC[:, None, None]
    k_UKNW, v_UKWN = (of_layer(x) if step.row_S is None else of_layer(x)[step.row_S] for x in cache.prompts)
    prompt = (k_UKNW, v_UKWN, mask(step.prompt_mask_SW))
    responses = [(of_layer(x.k), of_layer(x.v), mask(m)) for x, m in zip(cache.responses, step.masks, strict=False)]
    return attend_heads(q_S1HN, [prompt, *responses]), cache


def _write(x: jax.Array, new: jax.Array, i: jax.Array | None, column: jax.Array, axis: int) -> jax.Array:
    if i is None:
        return lax.dynamic_update_slice_in_dim(x, new, column, axis)
    start = [jnp.int32(0)] * x.ndim
    start[0], start[1 + axis] = i, column
    return lax.dynamic_update_slice(x, new[None], start)


def attend_heads(q_RBHN: jax.Array, parts: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
    """`attend_parts` of B tokens a row; its queries X are the heads of all tokens that read the same keys, by token."""
    (R, B, H, N), K = q_RBHN.shape, parts[0][0].shape[1]
    q_RKXN = q_RBHN.reshape(R, B, K, H // K, N).swapaxes(1, 2).reshape(R, K, -1, N)
    return attend_parts(q_RKXN, parts).reshape(R, K, B, H // K, N).swapaxes(1, 2).reshape(R, B, H, N)


def attend_parts(q_RKXN: jax.Array, parts: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
    """softmax(q·k/√N) v with one softmax over all parts (k [r, K, N, C], v [r, K, C, N], mask), in float32.

    Where there are fewer rows of keys than of queries, neighbouring queries share them: one product for the R / r of a
    row. Every query sees at least one key.
    """

    def product(pattern: str, x_RKXY: jax.Array, keys: jax.Array) -> jax.Array:
        R, K, X, Y = x_RKXY.shape
        if len(keys) == R:
            return jnp.einsum(pattern, x_RKXY, keys, preferred_element_type=jnp.float32)
        shared = x_RKXY.reshape(len(keys), -1, K, X, Y).swapaxes(1, 2).reshape(len(keys), K, -1, Y)
        out = jnp.einsum(pattern, shared, keys, preferred_element_type=jnp.float32)
        return out.reshape(len(keys), K, -1, X, out.shape[-1]).swapaxes(1, 2).reshape(R, K, X, -1)

    scale = q_RKXN.shape[-1] ** -0.5
    scores = [jnp.where(mask, product("rkxn,rknc->rkxc", q_RKXN, k) * scale, NEGATIVE) for k, _, mask in parts]
    peak = functools.reduce(jnp.maximum, [s.max(-1, keepdims=True) for s in scores])
    weights = [jnp.exp(s - peak) for s in scores]
    total = functools.reduce(jnp.add, [w.sum(-1, keepdims=True) for w in weights])
    values = [product("rkxc,rkcn->rkxn", w.astype(v.dtype), v) for w, (_, v, _) in zip(weights, parts, strict=True)]
    return (functools.reduce(jnp.add, values) / total).astype(q_RKXN.dtype)
