"""The decode kernel, interpreted, against the products of XLA; and rollouts with it against rollouts without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import CONFIG, full_logp, generate, ids

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.rollout import cache as caches
from jaxrl_post.rollout import decode_kernel
from jaxrl_post.rollout.schedule import decode_attention
from sharding.report import count_flops

WIDTH, SLOTS = 70, 5
LAYER = 1


@functools.cache
def attends():
    def by_xla(cache, clock, row, length, sampled, q, k, v):
        columns = cache.responses[0].columns
        step = caches.decode_step(cache, columns, clock, row, length, sampled)
        return caches.attend_cache(step, cache, jnp.int32(LAYER), q, k, v)

    def by_kernel(cache, clock, row, length, sampled, q, k, v):
        column = clock % cache.responses[0].columns
        seen = decode_kernel.Seen(row, length, sampled, column)
        return decode_kernel.attend(seen, True, cache, jnp.int32(LAYER), q, k, v)

    return jax.jit(by_xla), jax.jit(by_kernel)


def case(columns, seed):
    """A cache of noise: every column that a slot must not see would show."""
    rng = np.random.default_rng(seed)
    config = ModelConfig("qwen3", 98, 32, 64, 2, 6, 2, 16)
    empty = caches.empty_cache(config, False, 3, WIDTH, SLOTS + 1, (columns,))
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    cache = jax.tree.map(lambda x: 3 * draw(*x.shape), empty)
    row = jnp.asarray([2, 0, 1, 2, 0], jnp.int32)
    length = jnp.asarray([WIDTH, 1, 64, 65, 33], jnp.int32)
    return cache, row, length, draw(SLOTS, 1, 6, 16), draw(SLOTS, 1, 2, 16), draw(SLOTS, 1, 2, 16)


@pytest.mark.parametrize(
    ("columns", "clock", "sampled"),
    [
        (150, 149, [1, 150, 64, 65, 22]),  # up to the last column
        (150, 70, [71, 72, 150, 80, 7]),  # round the end, and to within the block that is written
        (150, 150 + 64, [1, 2, 65, 66, 149]),  # the first column of a block
        (20, 25, [20, 6, 5, 1, 7]),  # fewer columns than a block
    ],
)
def test_the_kernel_sees_what_the_masks_show(columns, clock, sampled):
    cache, row, length, q, k, v = case(columns, clock)
    arguments = (cache, jnp.int32(clock), row, length, jnp.asarray(sampled, jnp.int32), q, k, v)
    (expected, written), (found, kept) = (attend(*arguments) for attend in attends())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, kept, written)


def test_a_plan_counts_two_products_with_all_prompt_and_half_the_response_columns():
    cache, row, length, q, k, v = case(20, 0)
    step = functools.partial(attends()[1], cache, jnp.int32(3), row, length, length)
    assert count_flops(jax.make_jaxpr(step)(q, k, v).jaxpr) == 2 * 2 * SLOTS * 6 * 16 * (WIDTH + 20 // 2)


def test_a_slot_that_runs_nothing_gets_zeros():
    cache, row, length, q, k, v = case(20, 0)
    found, _ = attends()[1](cache, jnp.int32(3), row, length.at[1].set(0), jnp.full(SLOTS, 4, jnp.int32), q, k, v)
    assert not np.any(found[1])
    assert np.all(np.any(found[jnp.array([0, 2, 3, 4])], axis=(1, 2, 3)))


@pytest.mark.slow
def test_a_rollout_with_the_kernel_samples_what_one_without_does():
    """Slots are refilled at different times; some samples stop early."""
    limits = [1, 10, 3, 2, 5, 0, 9, 10, 4, 7]
    kw = {"limits": limits, "stop_ids": tuple(range(0, 98, 9)), "slots": 4, "refill": 2}
    plain, kernel = generate(**kw), generate(**kw, attention="triton")
    assert ids(kernel) == ids(plain)
    for a, b in zip(kernel.completions, plain.completions, strict=True):
        np.testing.assert_allclose(a.logp, b.logp, rtol=0, atol=1e-5)


def test_each_device_runs_the_kernel_on_its_own_heads():
    mesh = {"devices": 4, "axes": (("data", 2), ("tensor", 2))}
    found = generate(**mesh, attention="triton")
    assert ids(found) == ids(generate())
    first = found.completions[0]
    np.testing.assert_allclose(first.logp, full_logp([5, 6, 7, 8], first.ids), atol=1e-4)


def test_the_kernel_is_chosen_on_gpus_alone_and_refused_by_name_elsewhere():
    odd = ModelConfig("qwen3", 98, 32, 64, 2, 4, 2, 24)
    assert decode_attention("auto", CONFIG, "gpu") == "triton"
    assert {decode_attention("auto", m, p) for m, p in [(CONFIG, "cpu"), (CONFIG, "tpu"), (odd, "gpu")]} == {"xla"}
    assert decode_attention("xla", CONFIG, "gpu") == "xla"
    with pytest.raises(ValueError, match=r"rollout.attention=triton: there is no such kernel for a tpu; allowed here"):
        decode_attention("triton", CONFIG, "tpu")
    with pytest.raises(ValueError, match=r"rollout.attention=triton: a head width of 24 is not a power of two"):
        decode_attention("triton", odd, "gpu")
