"""The clipped value loss, explained variance and entropy by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import entropy, values
from jaxrl_post.objectives.reductions import masked_mean

NAN = jnp.nan


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_clipped_value_loss_and_its_gradient(transform):
    mask = jnp.array([[1, 1, 0]], bool)
    old, target = jnp.array([[1.0, 1.0, NAN]]), jnp.array([[3.0, 3.0, NAN]])

    def loss(value, clip=0.2):
        out = values.value_loss(value, old, target, mask, clip=clip)
        return out.term_BT.sum(), out

    value = jnp.array([[2.0, 0.5, NAN]])
    (_, out), gradient = transform(jax.value_and_grad(loss, has_aux=True))(value)
    np.testing.assert_allclose(out.term_BT, [[1.62, 3.125, 0]], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, -2.5, 0]], rtol=1e-6)
    np.testing.assert_array_equal(out.stats["clipped"], [[1, 0, 0]])
    np.testing.assert_allclose(jax.grad(lambda v: loss(v, None)[0])(value), [[-1, -2.5, 0]], rtol=1e-6)
    inside = jnp.array([[1.1, 0.9, NAN]])
    np.testing.assert_allclose(jax.grad(lambda v: loss(v)[0])(inside), [[-1.9, -2.1, 0]], rtol=1e-6)


def test_explained_variance():
    target = jnp.array([[1.0, 2, 3, NAN]])
    mask = jnp.array([[1, 1, 1, 0]], bool)
    for value, expected in (([1, 2, 3, NAN], 1), ([7, 7, 7, 0], 0), ([11, 12, 13, 5], 1), ([3, 2, 1, 0], -3)):
        got = values.explained_variance(jnp.array([value], jnp.float32), target, mask)
        assert got == pytest.approx(expected, abs=1e-5)
    assert values.explained_variance(target, jnp.ones((1, 4)), mask) == 0


@pytest.mark.parametrize("garbage", [0.0, -np.inf, np.nan, 50.0])
def test_entropy_of_the_live_positions_only(garbage):
    inf = np.inf
    logits = np.full((1, 5, 4), garbage, np.float32)
    logits[0, 0] = 3.0
    logits[0, 1] = [1, -inf, 1, -inf]
    mask = jnp.array([[1, 1, 0, 0, 0]], bool)
    f = jax.jit(jax.value_and_grad(lambda x: masked_mean(entropy.token_entropy(x, mask), mask)))
    value, gradient = f(jnp.asarray(logits))
    assert value == pytest.approx((np.log(4) + np.log(2)) / 2, rel=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)  # uniform rows are maxima
    bonus = entropy.entropy_bonus(entropy.token_entropy(jnp.asarray(logits), mask), mask, coef=0.1)
    np.testing.assert_allclose(bonus, -0.1 * np.log([[4, 2, 1, 1, 1]]), rtol=1e-5)


def test_entropy_is_never_negative_and_has_the_right_gradient():
    logits = (np.random.default_rng(0).normal(size=(1, 200, 7)) * np.logspace(-2, 3, 200)[:, None]).astype(np.float32)
    mask = np.ones((1, 200), bool)

    @jax.jit
    def total(logits):
        h = entropy.token_entropy(logits, mask)
        return h.sum(), h

    (_, h_BT), gradient = jax.value_and_grad(total, has_aux=True)(logits)
    assert h_BT.min() >= 0
    x = np.asarray(logits[0, 40], np.float64)
    p = np.exp(x) / np.exp(x).sum()
    h = -(p * np.log(p)).sum()
    np.testing.assert_allclose(gradient[0, 40], -p * (np.log(p) + h), atol=1e-5)
