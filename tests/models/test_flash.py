"""Kernels of attention, interpreted, against XLA's path; each platform's own blocks, grid and arrays in whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as mosaic

from jaxrl_post.models import flash_grid
from jaxrl_post.models.attention import Columns, packed_attention, visible
from jaxrl_post.models.flash import flash_attention
from sharding.report import count_flops

B, T, K, N = 2, 150, 2, 24
LENGTHS = [((5, 101, 17), (2, 39, 17)), ((130,), (41,))]  # of segments and of their trunks, row by row


def packed_rows():
    """Segments with a trunk and three branches of uneven lengths, and padding: in front, between and at the end."""
    segments, branches = np.zeros((2, B, T), np.int32)
    for row, (lengths, trunks) in enumerate(LENGTHS):
        start = 3
        for n, (length, trunk) in enumerate(zip(lengths, trunks, strict=True)):
            segments[row, start : start + length] = n + 1
            branches[row, start + trunk : start + length] = np.arange(length - trunk) * 3 // max(length - trunk, 1) + 1
            start += length + 2
    return segments, branches


def inputs(G, dtype):
    """q, k, v and a projection of the outputs; padding's are huge, so that whoever saw them would tell."""
    live = packed_rows()[0][..., None, None] > 0
    rng = np.random.default_rng(0)
    draw = lambda heads, padding: np.where(live, rng.standard_normal((B, T, heads, N)), padding)
    return [jnp.asarray(draw(heads, pad), dtype) for heads, pad in ((K * G, 1e3), (K, 1e3), (K, 1e3), (K * G, 0))]


def outcome(attention, given):
    """Outputs, and the gradients of a fixed projection of them to q, k and v."""
    rows = [jnp.asarray(x) for x in packed_rows()]

    def loss(qkv):
        out = attention(*qkv, *rows)
        return (out.astype(jnp.float32) * given[3]).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(given[:3])
    return [np.asarray(x, np.float32) for x in (out, *grads)]


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels of all platforms run here, those of a TPU in memories like a core's, where what is unwritten is NaN."""
    call, core = flash_grid.pl.pallas_call, mosaic.InterpretParams(uninitialized_memory="nan")

    def run(kernel, *, interpret, compiler_params, **rest):
        on_tpu = isinstance(compiler_params, mosaic.CompilerParams)
        return call(kernel, interpret=core if on_tpu else True, compiler_params=compiler_params, **rest)

    monkeypatch.setattr(flash_grid.pl, "pallas_call", run)


@functools.cache
def of_xla():
    return outcome(packed_attention, inputs(3, jnp.float32))


@functools.cache
def interpreted_here():
    return outcome(functools.partial(flash_attention, platform="cpu"), inputs(3, jnp.float32))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_values_and_gradients_are_those_of_xla(platform, interpreted):
    flash = functools.partial(flash_attention, platform=platform)
    ours = interpreted_here() if platform == "cpu" else outcome(flash, inputs(3, jnp.float32))
    for actual, wanted in zip(ours, of_xla(), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5)
        assert 0.1 < np.abs(wanted).max() < 100


@pytest.mark.slow
def test_a_tpu_adds_up_the_heads_that_do_not_fit_at_once(interpreted, monkeypatch):
    monkeypatch.setattr(flash_grid, "TPU_WHOLE", 2 * flash_grid.whole_bytes(256, N, 4))
    assert [flash_grid.heads_at_once("tpu", heads, 256, N, 4) for heads in (2, 3, 4)] == [2, 1, 2]
    ours = outcome(functools.partial(flash_attention, platform="tpu"), inputs(3, jnp.float32))
    for actual, wanted in zip(ours, of_xla(), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5)


def test_bfloat16_differs_from_float32_by_its_own_rounding():
    given = inputs(2, jnp.bfloat16)
    exact = outcome(packed_attention, [x.astype(jnp.float32) for x in given])
    ours, xla = (outcome(f, given) for f in (functools.partial(flash_attention, platform="cpu"), packed_attention))
    for actual, others, wanted in zip(ours, xla, exact, strict=True):
        assert np.abs(actual - wanted).max() <= 1.2 * np.abs(others - wanted).max() + 2**-9


def test_queries_that_see_nothing_are_zero_and_move_nothing():
    padding = packed_rows()[0] == 0
    for x in interpreted_here():
        assert not x[padding].any()
        assert np.isfinite(x).all()


def test_the_blocks_visited_are_those_with_something_to_see():
    """A trunk of two blocks and branches of two each, then a segment of one block: a branch visits trunk and itself."""
    segments = np.repeat([1, 1, 1, 1, 1, 1, 2, 0], 4)[None]
    branches = np.repeat([0, 0, 1, 1, 2, 2, 0, 0], 4)[None]
    numbers = np.asarray(flash_grid.visits(jnp.stack([segments, branches], axis=1), 4))[0, :, 0]
    visited = [numbers[i, 1 : 1 + numbers[i, 0]].tolist() for i in range(8)]
    assert visited == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5], [6], []]
    numbers = np.asarray(flash_grid.visitors(jnp.stack([segments, branches], axis=1), 4))[0, :, 0]
    visitors = [numbers[j, 1 : 1 + numbers[j, 0]].tolist() for j in range(8)]
    assert visitors == [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [2, 3], [3], [4, 5], [5], [6], []]


def test_no_block_with_something_to_see_is_left_out():
    """Of 20 rows of segments and branches in no order, in blocks of four."""
    rng = np.random.default_rng(0)
    run = lambda: np.repeat(rng.integers(0, 4, 64), rng.integers(1, 12, 64))[:64]
    segments, branches = (jnp.asarray([run() for _ in range(20)]) for _ in range(2))
    columns = Columns(jnp.arange(64), segments, branches)
    seen = np.asarray(visible(columns, columns)).reshape(20, 16, 4, 16, 4).any((2, 4))
    marked = np.asarray(flash_grid.may_see(jnp.stack([segments, branches], axis=1), 4))
    assert not (seen & ~marked).any()
    assert seen.any((1, 2)).all()
    assert not marked.all((1, 2)).any()


def test_a_plan_counts_what_the_kernels_say_they_compute():
    """Two products of half of all pairs forward, seven backward, two operations each."""
    given, rows = inputs(3, jnp.float32), [jnp.asarray(x) for x in packed_rows()]
    attend = lambda *qkv: flash_attention(*qkv, *rows, "cpu").sum()
    jaxpr = jax.make_jaxpr(jax.grad(attend, argnums=(0, 1, 2)))(*given[:3]).jaxpr
    assert count_flops(jaxpr) == 9 * B * 3 * K * 160 * 160 * N
