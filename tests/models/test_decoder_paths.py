"""Training rows, packed rows and shared prompts are one function of the tokens (tests/rollout: prefill and decode too).

The sequences: a prompt of 5 tokens, and a response of 3 or of 4 tokens after it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import CASES, draw

from jaxrl_post.models.attention import QUERY_CHUNK, attend, packed_attention
from jaxrl_post.models.decoder import abstract

RNG = np.random.default_rng(3)
PROMPT, FIRST, SECOND = [11, 8, 17, 22, 17], [76, 83, 55], [3, 9, 31, 41]
GARBAGE = 77
WIDTH = 19
FAMILIES = ["llama3-rope", "qwen2", "qwen3"]
SEQUENCES = (PROMPT + FIRST, PROMPT + SECOND)
SEPARATE, SHARED, PACKED = range(3)


def layouts():
    """Three layouts of the two sequences, each as int32 (tokens, positions, segments, branches) [2, 19] and the places
    where the hidden states of both sequences are found, flat in [2 · 19]."""
    fill = lambda row, value=0: row + [value] * (WIDTH - len(row))
    none = fill([])
    empty = [GARBAGE] * WIDTH
    separate = (
        [fill(sequence, GARBAGE) for sequence in SEQUENCES],
        [fill(list(range(len(sequence)))) for sequence in SEQUENCES],
        [fill([1] * len(sequence)) for sequence in SEQUENCES],
        [none, none],
        [*range(8), *range(WIDTH, WIDTH + 9)],
    )
    shared = (
        [fill(PROMPT + FIRST + SECOND, GARBAGE), empty],
        [fill([0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]), none],
        [fill([1] * 12), none],
        [fill([0] * 5 + [1] * 3 + [2] * 4), none],
        [*range(8), 0, 1, 2, 3, 4, 8, 9, 10, 11],
    )
    packed = (
        [[GARBAGE, *PROMPT, *FIRST, *PROMPT, *SECOND, GARBAGE], empty],
        [[0, *range(8), *range(9), 0], none],
        [[0, *[1] * 8, *[2] * 9, 0], none],
        [none, none],
        [*range(1, 18)],
    )
    return [tuple(jnp.asarray(field, jnp.int32) for field in layout) for layout in (separate, shared, packed)]


@functools.cache
def program(config):
    """(params, layout) -> hidden states of both sequences [17, D], and the gradient of a fixed random projection of
    those that predict the responses: from the prompt's last token on."""
    graphdef = abstract(config)[0]
    probe = np.random.default_rng(4).standard_normal((17, config.hidden_size))
    probe[[0, 1, 2, 3, 8, 9, 10, 11]] = 0

    def loss(params, tokens, positions, segments, branches, places):
        x = nnx.merge(graphdef, params).hidden(tokens, positions, segments, branches)
        states = x.reshape(-1, config.hidden_size)[places]
        return (states * jnp.asarray(probe, jnp.float32)).sum(), (states, x)

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("case", FAMILIES)
def test_packed_and_shared_rows_equal_separate_ones_in_values_and_gradients(case):
    run, params = program(CASES[case]), draw(CASES[case])
    grads, (states, _) = run(params, *layouts()[SEPARATE])
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
    close = lambda a, b: np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=1e-5)
    for layout in (SHARED, PACKED):
        other_grads, (other, _) = run(params, *layouts()[layout])
        np.testing.assert_allclose(other, states, rtol=0, atol=1e-5)
        jax.tree.map(close, other_grads, grads)


def test_padding_content_moves_nothing_and_its_embedding_gets_no_gradient():
    run, params = program(CASES["qwen3"]), draw(CASES["qwen3"])
    tokens, positions, segments, branches, places = layouts()[PACKED]
    grads, (states, x) = run(params, tokens, positions, segments, branches, places)
    _, (other, _) = run(params, jnp.where(segments == 0, 5, tokens), positions, segments, branches, places)
    np.testing.assert_array_equal(states, other)
    assert np.isfinite(np.asarray(x)).all()
    assert not np.asarray(grads["embed"])[GARBAGE].any()
    assert np.asarray(grads["embed"])[PROMPT].all(-1).any()
    assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "full"},
        {"remat": "dots"},
        {"remat": "full_offload"},
        {"remat": "dots_offload"},
        {"scan_layers": False},
        {"scan_layers": False, "remat": "full"},
    ],
    ids=str,
)
def test_neither_remat_nor_the_scan_over_layers_changes_a_gradient(changes):
    config = CASES["qwen3"]
    grads, _ = program(config)(draw(config), *layouts()[PACKED])
    others, _ = program(dataclasses.replace(config, **changes))(draw(config), *layouts()[PACKED])
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
    close = lambda a, b: np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=1e-6)
    jax.tree.map(close, others, grads)


def test_a_query_that_sees_nothing_returns_zero_and_has_zero_gradient():
    q = jnp.asarray(RNG.standard_normal((1, 1, 2, 2, 4)), jnp.float32)
    k = 1e4 * jnp.asarray(RNG.standard_normal((1, 1, 3, 4)), jnp.float32)
    mask = jnp.asarray([[[False] * 3, [True, False, True]]])
    out = attend(q, k, k, mask)
    np.testing.assert_array_equal(out[0, 0, :, 0], np.zeros((2, 4)))
    assert np.isfinite(np.asarray(out)).all()
    grads = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v, mask)[:, :, :, :1].sum(), argnums=(0, 1, 2)))(q, k, k)
    for grad in grads:
        np.testing.assert_array_equal(grad, np.zeros(grad.shape))


def test_weights_of_attention_are_made_again_where_layers_are_scanned():
    T, shape = 256, (1, 256, 2, 4)
    q, k, v = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for _ in range(3))
    rows = jnp.ones((1, T), jnp.int32), jnp.zeros((1, T), jnp.int32)

    def of(keep):
        linear = lambda *qkv: jax.vjp(lambda *qkv: packed_attention(*qkv, *rows, keep=keep), *qkv)
        gradient = jax.jit(lambda *qkv: (lambda out, back: back(out))(*linear(*qkv)))
        _, kept = jax.eval_shape(linear, q, k, v)
        return gradient(q, k, v), max(x.size for x in jax.tree.leaves(kept))

    (kept, largest), (made_again, small) = of(True), of(False)
    for a, b in zip(kept, made_again, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert small <= q.size < T * T // 4 <= largest


def test_long_rows_attend_in_blocks_with_the_same_result():
    T, shape = 2 * QUERY_CHUNK, (1, 2 * QUERY_CHUNK, 2, 4)
    q, k, v = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for _ in range(3))
    segments = jnp.asarray(np.repeat([1, 2, 0], [700, 300, 24])[None])
    branches = jnp.asarray(np.repeat([0, 1, 2, 0], [500, 150, 50, T - 700])[None])
    long = jax.jit(packed_attention)(q, k, v, segments, branches)
    # One token more and no block size divides the row: it goes through in one piece.
    extra = lambda x: np.concatenate([x, np.zeros_like(x[:, :1])], axis=1)
    whole = jax.jit(packed_attention)(*(extra(np.asarray(x)) for x in (q, k, v, segments, branches)))[:, :T]
    np.testing.assert_allclose(long, whole, rtol=0, atol=1e-6)
