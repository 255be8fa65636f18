"""KL estimators: values by hand, the gradient each one really has, and its expectation against the exact KL."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import kl

ONE = jnp.ones((1, 1), bool)
GRADIENT = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - np.exp(-d),
    "abs": np.sign,
    "k1+": lambda d: d,
    "k2+": lambda d: d,
    "k3+": lambda d: d,
    "abs+": lambda d: d,
}


@pytest.mark.parametrize("suffix", ["", "+"])
@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.jit(f, static_argnums=3)])
def test_values_by_hand(transform, suffix):
    policy, reference = jnp.array([[-1.0]]), jnp.array([[-1.5]])
    expected = {"k1": 0.5, "k2": 0.125, "k3": np.exp(-0.5) + 0.5 - 1, "abs": 0.5}
    for name, value in expected.items():
        forward = transform(kl.penalty)(policy, reference, ONE, name + suffix)
        np.testing.assert_allclose(forward, [[value]], rtol=1e-6)
        np.testing.assert_array_equal(transform(kl.penalty)(policy, policy, ONE, name + suffix), 0)
    swapped = {name: float(kl.penalty(reference, policy, ONE, name)[0, 0]) for name in expected}
    assert swapped == pytest.approx({"k1": -0.5, "k2": 0.125, "k3": np.exp(0.5) - 0.5 - 1, "abs": 0.5}, rel=1e-6)


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
@pytest.mark.parametrize("delta", [-1.3, 0.4])
def test_gradient_by_hand_and_by_finite_differences(estimator, delta):
    f = lambda x: kl.penalty(x, jnp.zeros((1, 1)), ONE, estimator)[0, 0]
    x = jnp.full((1, 1), delta)
    gradient = float(jax.grad(f)(x)[0, 0])
    assert gradient == pytest.approx(GRADIENT[estimator](delta), rel=1e-5)
    value_estimator = "k2" if estimator.endswith("+") else estimator
    g = lambda d: float(kl.penalty(x + d, jnp.zeros((1, 1)), ONE, value_estimator)[0, 0])
    assert gradient == pytest.approx((g(1e-2) - g(-1e-2)) / 2e-2, rel=2e-3)


def test_k2_and_k3_are_never_negative():
    delta = jnp.asarray(np.random.default_rng(0).normal(size=(50, 200)) * np.logspace(-8, 1, 50)[:, None], jnp.float32)
    for name in ("k2", "k3"):
        assert kl.penalty(delta, 0 * delta, jnp.ones((50, 200), bool), name).min() >= 0


def test_clamps():
    delta = jnp.array([[-30.0, 30.0]])
    mask = jnp.ones((1, 2), bool)
    np.testing.assert_array_equal(kl.penalty(delta, 0 * delta, mask, "k1"), [[-20, 20]])
    np.testing.assert_allclose(kl.penalty(delta, 0 * delta, mask, "k3"), [[10, 10]])
    np.testing.assert_array_equal(kl.penalty(jnp.array([[-5.0]]), jnp.zeros((1, 1)), ONE, "k3"), [[10]])
    assert jax.grad(lambda x: kl.penalty(x, 0 * delta, mask, "k2").sum())(delta).tolist() == [[0, 0]]


def _expected_gradient(term, theta, sampler_logits):
    """Σ_y π(y)·∇term(y): the gradient that averages over samples would converge to."""
    p = jax.nn.softmax(sampler_logits)
    jacobian = jax.jacobian(lambda t: term(jax.nn.log_softmax(t)[None])[0])(theta)
    return p @ jacobian


def test_expected_gradients_against_the_exact_divergences():
    theta, ref = jnp.array([0.3, -0.5, 1.0]), jax.nn.log_softmax(jnp.array([0.0, 0.7, -0.2]))[None]
    behaviour = jnp.array([0.1, 0.1, 0.4])
    mask = jnp.ones((1, 3), bool)
    log_softmax = jax.nn.log_softmax
    reverse = jax.grad(lambda t: jnp.sum(jax.nn.softmax(t) * (log_softmax(t) - ref[0])))(theta)
    forward = jax.grad(lambda t: jnp.sum(jnp.exp(ref[0]) * (ref[0] - log_softmax(t))))(theta)
    got = {e: _expected_gradient(lambda x, e=e: kl.penalty(x, ref, mask, e), theta, theta) for e in kl.ESTIMATORS}
    np.testing.assert_allclose(got["k1"], 0, atol=1e-6)
    np.testing.assert_allclose(got["k3"], forward, atol=1e-6)
    for estimator in ("k2", "k1+", "k3+", "abs+"):
        np.testing.assert_allclose(got[estimator], reverse, atol=1e-6)
    for estimator in ("k1", "k3"):
        for sampler in (theta, behaviour):
            old = log_softmax(sampler)[None]
            term = lambda x, old=old, e=estimator: kl.importance_corrected(x, old, ref, mask, e)
            np.testing.assert_allclose(_expected_gradient(term, theta, sampler), reverse, atol=1e-6)


def test_reference_gets_no_gradient_and_unknown_names_are_refused():
    x = jnp.array([[0.5]])
    assert jax.grad(lambda r: kl.penalty(x, r, ONE, "k3").sum())(x - 1) == 0
    with pytest.raises(ValueError, match=r"low_var.*k1, k2, k3"):
        kl.penalty(x, x, ONE, "low_var")


def test_adaptive_coefficient():
    step = lambda observed: float(kl.adapted_coefficient(0.1, observed, target=6.0, samples=100, horizon=1000))
    assert step(6.0) == pytest.approx(0.1)
    assert step(60.0) == pytest.approx(0.1 * 1.02)
    assert step(0.0) == pytest.approx(0.1 * 0.98)
    assert step(6.6) == pytest.approx(0.1 * 1.01)
    with pytest.raises(ValueError, match="target=0"):
        kl.adapted_coefficient(0.1, 1.0, target=0, samples=1, horizon=1)
