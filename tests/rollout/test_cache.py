"""Prefill in pieces and decode over the cache are the plain forward pass, wherever a sequence is cut between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_post.models.config import Llama3Rope, ModelConfig
from jaxrl_post.models.decoder import Decoder, split
from jaxrl_post.rollout import cache as caches

COMMON = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "layers": 3, "heads": 4, "kv_heads": 2,
          "head_dim": 8, "initializer_range": 0.4}  # fmt: skip
CONFIGS = {
    "llama": ModelConfig("llama", **COMMON, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 16)),
    "qwen2": ModelConfig("qwen2", **COMMON, tie_embeddings=True),
    "qwen3": ModelConfig("qwen3", **COMMON),
}
SEQUENCE = [11, 8, 17, 22, 17, 56, 43, 55, 3, 9, 31, 41]
WIDTH, COLUMNS, GARBAGE = 6, 8, 60


@functools.cache
def model(family):
    return split(Decoder(CONFIGS[family], jax.random.key(1)))


@functools.cache
def programs(family, unrolled):
    """Jitted prefill(params, tokens, begin, rows, cache) and decode(params, tokens, positions, end, …, cache)."""
    graphdef, _ = model(family)

    def through(params, tokens, positions, cache, attention):
        decoder = nnx.merge(graphdef, params)
        weights = decoder.unrolled() if unrolled else decoder.stacked()
        x, cache = decoder.through(weights, tokens, positions, cache, attention)
        return decoder.logits(x), cache

    def prefill(params, tokens, begin, rows, cache):
        positions = jnp.broadcast_to(begin + jnp.arange(tokens.shape[1]), tokens.shape)
        return through(params, tokens, positions, cache, functools.partial(caches.attend_prompt, begin, rows))

    def decode(params, tokens, end, clock, rows, lengths, sampled, cache):
        step = caches.decode_step(cache, end, clock, rows, lengths, sampled)
        attention = functools.partial(caches.attend_cache, step)
        logits, cache = through(params, tokens[:, None], (lengths + sampled - 1)[:, None], cache, attention)
        return logits[:, 0], cache

    return jax.jit(prefill), jax.jit(decode, static_argnums=2)


@functools.cache
def full(family):
    graphdef, params = model(family)

    def logits(tokens):
        decoder = nnx.merge(graphdef, params)
        ones = jnp.ones_like(tokens)
        return decoder.logits(decoder.hidden(tokens, jnp.arange(tokens.shape[1])[None], ones, ones - 1))[0]

    return np.asarray(jax.jit(logits)(jnp.asarray([SEQUENCE])))


def stale(family, unrolled, chunks):
    """A cache of three slots and four prompt rows full of a former call's values: none of it may show."""
    empty = caches.empty_cache(CONFIGS[family], unrolled, 4, WIDTH, 3, chunks)
    return jax.tree.map(lambda x: x + 9.0, empty)


def prefilled(family, unrolled, cache, lengths, piece):
    """Rows 2, 0, 3 hold the first `lengths` tokens of the sequence; logits of all columns [3, W, V]."""
    padded = np.asarray([SEQUENCE[:n] + [GARBAGE] * (WIDTH - n) for n in lengths])
    logits = []
    for begin in range(0, WIDTH, piece):
        out, cache = programs(family, unrolled)[0](
            model(family)[1],
            jnp.asarray(padded[:, begin : begin + piece]),
            jnp.int32(begin),
            jnp.asarray([2, 0, 3]),
            cache,
        )
        logits.append(out)
    return np.concatenate(logits, axis=1), cache


@pytest.mark.parametrize(("family", "unrolled"), [("llama", False), ("qwen2", True), ("qwen3", True), ("qwen3", False)])
@pytest.mark.parametrize(("piece", "chunks", "clock"), [(6, (8,), 5), (2, (3, 5), 0)])
def test_every_cut_into_prompt_and_response_gives_the_logits_of_one_forward_pass(
    family, unrolled, piece, chunks, clock
):
    """The first case goes round the ring of columns, the second from a first tier into the next."""
    lengths = np.array([5, 3, 1])
    logits, cache = prefilled(family, unrolled, stale(family, unrolled, chunks), lengths, piece)
    for row, n in zip(logits, lengths, strict=True):
        np.testing.assert_allclose(row[:n], full(family)[:n], rtol=0, atol=2e-5)
    for t in range(7):
        tokens = jnp.asarray([SEQUENCE[n + t] for n in lengths])
        end = chunks[0] if (clock + t) % COLUMNS < chunks[0] else COLUMNS
        logits, cache = programs(family, unrolled)[1](
            model(family)[1], tokens, end, jnp.int32(clock + t), jnp.asarray([2, 0, 3]), jnp.asarray(lengths),
            jnp.full(3, t + 1), cache,
        )  # fmt: skip
        expected = np.stack([full(family)[n + t] for n in lengths])
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("unrolled", [True, False])
def test_one_prompt_row_serves_every_slot_and_slots_of_any_age(unrolled):
    """Slot 1 starts two steps after slot 0 on the same prompt; a packed cache goes on as the whole one would."""
    _, cache = prefilled("qwen3", unrolled, stale("qwen3", unrolled, (3, 5)), [5, 3, 1], 6)
    decode, params = programs("qwen3", unrolled)[1], model("qwen3")[1]
    rows, lengths = jnp.asarray([2, 2, 0]), jnp.asarray([5, 5, 3])
    at = lambda slot, sampled: SEQUENCE[(5, 5, 3)[slot] + sampled - 1]
    for t, sampled in enumerate([[1, 1, 1], [2, 1, 2], [3, 1, 3], [4, 2, 4]]):
        tokens = jnp.asarray([at(slot, n) for slot, n in enumerate(sampled)])
        logits, cache = decode(
            params, tokens, 3 if t < 3 else 8, jnp.int32(t), rows, lengths, jnp.asarray(sampled), cache
        )
    expected = [full("qwen3")[8], full("qwen3")[6], full("qwen3")[6]]
    np.testing.assert_allclose(logits, np.stack(expected), rtol=0, atol=2e-5)
    packed = caches.pack(cache, jnp.asarray([1, 0]))
    assert caches.chunk_ends(packed) == [8]
    logits, _ = decode(params, jnp.asarray([at(1, 3), at(0, 5)]), 8, jnp.int32(4), rows[:2], lengths[:2],
                       jnp.asarray([3, 5]), packed)  # fmt: skip
    np.testing.assert_allclose(logits, np.stack([full("qwen3")[7], full("qwen3")[9]]), rtol=0, atol=2e-5)


def test_rows_out_of_range_write_nothing():
    for unrolled in (True, False):
        before = stale("qwen2", unrolled, (8,))
        _, after = programs("qwen2", unrolled)[0](
            model("qwen2")[1], jnp.asarray([SEQUENCE[:6]] * 3), jnp.int32(0), jnp.asarray([4, 1, 4]), before
        )
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            rows = old.ndim - 4
            changed = (np.asarray(old) != np.asarray(new)).any(axis=tuple(a for a in range(old.ndim) if a != rows))
            assert changed.tolist() == [False, old.shape[rows] == 4, False, False][: old.shape[rows]]
