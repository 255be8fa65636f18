"""Log-probs by hand, chunked against whole, packed against separate."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_training import tiny_params

from jaxrl_post.training.logprobs import chunked_logprobs, target_stats, token_logprobs
from jaxrl_post.training.packing import PackShape, pack
from jaxrl_post.types import Trajectory


def test_the_temperature_divides_the_logits():
    logits = jnp.array([[[2.0, 1.0, 0.0, -1.0]]])
    for temperature, expected in ((0.5, -2.145078), (1.0, -1.440190)):
        logp, _ = target_stats(logits, jnp.array([[1]]), temperature)
        np.testing.assert_allclose(logp, [[expected]], atol=1e-6)


def test_entropy_of_uniform_rows_survives_impossible_tokens():
    logits = jnp.array([[[0.0, 0.0, 0.0, 0.0], [3.0, 3.0, -jnp.inf, -jnp.inf], [5.0, -jnp.inf, -jnp.inf, -jnp.inf]]])
    logp, entropy = target_stats(logits, jnp.array([[3, 0, 0]]), 1.0)
    np.testing.assert_allclose(entropy, [[math.log(4), math.log(2), 0.0]], atol=1e-6)
    np.testing.assert_allclose(logp, [[-math.log(4), -math.log(2), 0.0]], atol=1e-6)
    gradient = jax.grad(lambda z: target_stats(z, jnp.array([[3, 0, 0]]), 1.0)[0].sum())(logits)
    assert np.isfinite(gradient).all()


def head_inputs(B=2, M=7, D=5, V=11):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    mask = np.arange(M) < np.array([[4], [2]])
    return draw(V, D), draw(B, M, D), jnp.asarray(rng.integers(0, V, (B, M)), jnp.int32), jnp.asarray(mask)


def logprobs_of(head_VD, x_BMD, target, mask, chunk):
    logits = lambda x: jnp.einsum("bmd,vd->bmv", x, head_VD)
    return chunked_logprobs(logits, x_BMD, target, mask, temperature=0.7, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_equal_the_whole_in_value_and_gradient(chunk):
    head, x, target, mask = head_inputs()
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(target.shape), jnp.float32)

    def whole(head, x):
        z = jnp.einsum("bmd,vd->bmv", x, head) / 0.7
        logp = jax.nn.log_softmax(z)
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        picked = jnp.take_along_axis(logp, target[..., None], axis=-1)[..., 0]
        return jnp.where(mask, picked, 0.0), jnp.where(mask, entropy, 0.0)

    expected = whole(head, x)
    actual = logprobs_of(head, x, target, mask, chunk)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), actual, expected)
    weighted = lambda f: jax.grad(lambda h, x: jnp.sum(f(h, x)[0] * cotangent), argnums=(0, 1))(head, x)
    chunked = weighted(lambda h, x: logprobs_of(h, x, target, mask, chunk))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), chunked, weighted(whole))
    assert not np.asarray(chunked[1])[~np.asarray(mask)].any()


def test_chunks_without_live_targets_never_reach_the_head():
    """Rows have 4 and 2 live targets of 7: with chunk 3, two chunks are computed in each pass and one is skipped."""
    head, x, target, mask = head_inputs()
    calls = []

    def logits(x_BCD):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.einsum("bmd,vd->bmv", x_BCD, head)

    loss = lambda x: chunked_logprobs(logits, x, target, mask, temperature=1.0, chunk=3)[0].sum()
    jax.block_until_ready(jax.jit(loss)(x))
    jax.effects_barrier()
    assert len(calls) == 2


def test_no_array_holds_logits_of_all_targets():
    """Compiled text, forward and backward: [2, 3, 11] exists, nothing has 11 × (all 9 padded targets)."""
    head, x, target, mask = head_inputs()
    loss = lambda h, x: logprobs_of(h, x, target, mask, 3)[0].sum()
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(head, x).as_text()
    assert "tensor<2x3x11xf32>" in text
    for stacked in ("2x7x11", "2x9x11", "3x2x3x11", "18x11", "14x11"):
        assert f"tensor<{stacked}" not in text


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 3), (1.0, 0)])
def test_greedy_temperature_and_empty_chunks_are_refused(temperature, chunk):
    head, x, target, mask = head_inputs()
    with pytest.raises(ValueError, match=f"temperature={temperature} and chunk={chunk}"):
        chunked_logprobs(lambda x: x @ head.T, x, target, mask, temperature=temperature, chunk=chunk)


PARTS = ("tokens", "positions", "segments", "branches", "source", "target", "mask")


@functools.lru_cache
def _scorer():
    graphdef, params = tiny_params()

    @jax.jit
    def score(*parts):
        return token_logprobs(nnx.merge(graphdef, jax.tree.map(jnp.asarray, params)), *parts, temperature=1.0, chunk=4)[
            0
        ]

    return score


def scored(*samples):
    """Log-probs of each sample's response, from rows of one shape."""
    shape = PackShape(rows=1, length=16, targets=16, micro_batches=1)
    batch, _, _ = pack(samples, shape, aggregation="token-mean")
    logp = _scorer()(*(getattr(batch, part)[0] for part in PARTS))[0]
    return [np.asarray(logp[batch.rollout_logp[0, 0] == mark]) for mark in sorted({float(t.logp[0]) for t in samples})]


def sample(group, prompt, response, mark):
    return Trajectory(group, tuple(prompt), np.array(response, np.int32), np.full(len(response), mark, np.float32), 1.0)


def test_packed_sequences_equal_separate_ones_and_do_not_see_each_other():
    a, b = sample(0, [10], [11, 12], 1.0), sample(1, [20], [21, 22, 23], 2.0)
    sibling = sample(1, [20], [24, 25], 3.0)
    changed = sample(0, [13], [14, 15], 1.0)
    packed = scored(a, b, sibling)
    for together, alone in zip(packed, (a, b, sibling), strict=True):
        np.testing.assert_allclose(together, scored(alone)[0], atol=1e-5)
    moved = scored(changed, b, sibling)
    np.testing.assert_array_equal(moved[1], packed[1])
    np.testing.assert_array_equal(moved[2], packed[2])
    assert np.abs(moved[0] - packed[0]).min() > 1e-3
