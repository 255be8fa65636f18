"""Aggregation modes by hand, garbage under the mask, and splits that must not change the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import reductions

TERM = np.array([[1, 2, 3, 4], [10, 99, 99, 99]], np.float32)
MASK = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
EXPECTED = {
    "token-mean": 4.0,
    "token-sum": 20.0,
    "seq-mean-token-mean": 6.25,
    "seq-mean-token-sum": 10.0,
    "seq-mean-token-sum-norm": 1.25,
}


def weights(mask_BT, mode):
    per_sequence = reductions.token_weights(mask_BT.sum(1), mode, scale_length=8)
    return np.repeat(per_sequence[:, None], mask_BT.shape[1], 1)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize("garbage", [99.0, np.nan, np.inf, -1e30])
@pytest.mark.parametrize("mode", list(EXPECTED))
def test_each_mode_ignores_what_lies_under_the_mask(mode, garbage, transform):
    term = np.where(MASK, TERM, np.float32(garbage))
    weight = np.where(MASK, weights(MASK, mode), np.float32(garbage))
    value, gradient = transform(jax.value_and_grad(reductions.weighted_sum))(term, MASK, weight)
    assert value == pytest.approx(EXPECTED[mode], rel=1e-6)
    np.testing.assert_array_equal(gradient, np.where(MASK, weights(MASK, mode), 0))
    if mode == "token-mean":
        np.testing.assert_allclose(np.asarray(gradient)[MASK], 0.2, rtol=1e-6)


@pytest.mark.parametrize("splits", [1, 2])
def test_token_mean_is_not_a_mean_of_micro_batch_means(splits):
    lengths = np.array([10, 100])
    mask = np.arange(100)[None] < lengths[:, None]
    nll = np.where(mask, np.array([[1.0], [3.0]]), np.nan)
    weight = np.repeat(reductions.token_weights(lengths, "token-mean")[:, None], 100, 1)
    parts = [
        float(reductions.weighted_sum(*map(jnp.asarray, part)))
        for part in zip(*(np.split(x, splits) for x in (nll, mask, weight)), strict=True)
    ]
    assert sum(parts) == pytest.approx(310 / 110, rel=1e-6)


@jax.jit
@jax.grad
def tiny_model_gradient(theta, features, mask, weight):
    return reductions.weighted_sum(jax.nn.softplus(features @ theta), mask, weight)


@pytest.mark.parametrize("mode", list(EXPECTED))
def test_gradients_of_any_accumulation_agree(mode):
    rng = np.random.default_rng(0)
    lengths = np.array([3, 17, 5, 64])
    mask = np.arange(64)[None] < lengths[:, None]
    features = rng.normal(size=(4, 64, 5)).astype(np.float32)
    weight = np.repeat(reductions.token_weights(lengths, mode, 32)[:, None], 64, 1)

    gradients = []
    for splits in (1, 2, 4):
        parts = zip(*(np.split(x, splits) for x in (features, mask, weight)), strict=True)
        gradients.append(sum(np.asarray(tiny_model_gradient(np.ones(5, np.float32), *part)) for part in parts))
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients[2], gradients[0], rtol=1e-5, atol=1e-6)


def test_sequences_without_live_tokens_do_not_count():
    np.testing.assert_array_equal(reductions.token_weights([2, 0, 4], "seq-mean-token-sum"), [0.5, 0, 0.5])
    np.testing.assert_array_equal(reductions.token_weights([2, 0, 4], "seq-mean-token-mean"), [0.25, 0, 0.125])
    for mode in EXPECTED:
        np.testing.assert_array_equal(reductions.token_weights([0, 0], mode, 8), [0, 0])
        assert reductions.token_weights([], mode, 8).shape == (0,)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match=r"token-avg.*token-mean, token-sum"):
        reductions.token_weights([1], "token-avg")
    with pytest.raises(ValueError, match="scale_length=None"):
        reductions.token_weights([1], "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="-1"):
        reductions.token_weights([-1], "token-mean")
    with pytest.raises(ValueError, match="num_sequences=2"):
        reductions.sequence_sum(jnp.ones((1, 2)), jnp.ones((1, 2), bool), None, 2)


def test_masked_mean_of_nothing_is_zero():
    x = jnp.full((2, 3), jnp.nan)
    value, gradient = jax.jit(jax.value_and_grad(reductions.masked_mean))(x, jnp.zeros((2, 3), bool))
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


def test_packed_rows_reduce_and_spread_like_separate_rows():
    x = jnp.array([[1.0, 2, 3, 10, jnp.nan], [4.0, 5, jnp.inf, 7, 8]])
    mask = jnp.array([[1, 1, 1, 1, 0], [1, 1, 0, 1, 1]], bool)
    sequence = jnp.array([[0, 0, 0, 2, 2], [0, 1, 1, 1, 2]])

    @jax.jit
    def reduce(x):
        mean = reductions.sequence_mean(x, mask, sequence, 3)
        return mean.sum(), (
            reductions.sequence_sum(x, mask, sequence, 3),
            mean,
            reductions.spread(mean, mask, sequence),
            reductions.sequence_mean(x, mask),
        )

    (_, (total, mean, spread, rows)), gradient = jax.value_and_grad(reduce, has_aux=True)(x)
    np.testing.assert_array_equal(total, [[6, 0, 10], [4, 12, 8]])
    np.testing.assert_array_equal(mean, [[2, 0, 10], [4, 6, 8]])
    np.testing.assert_array_equal(spread, [[2, 2, 2, 10, 0], [4, 6, 0, 6, 8]])
    np.testing.assert_array_equal(rows, [[4], [6]])
    np.testing.assert_allclose(gradient, [[1 / 3, 1 / 3, 1 / 3, 1, 0], [1, 0.5, 0, 0.5, 1]], rtol=1e-6)


def test_sequence_reductions_vmap_over_micro_batches():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(3, 2, 6)), jnp.float32)
    mask = jnp.asarray(rng.random((3, 2, 6)) < 0.7)
    sequence = jnp.asarray(np.sort(rng.integers(0, 2, (3, 2, 6))))
    f = lambda *a: reductions.sequence_mean(*a, num_sequences=2)
    batched = jax.jit(jax.vmap(f))(x, mask, sequence)
    one = jax.jit(f)
    for i in range(3):
        np.testing.assert_allclose(batched[i], one(x[i], mask[i], sequence[i]), rtol=1e-6)
