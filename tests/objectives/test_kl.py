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


THETA, MASK = np.float32([0.3, -0.5, 1.0]), np.ones((1, 3), bool)
P, Q = (np.exp(x) / np.exp(x).sum() for x in (np.float64(THETA), np.array([0.0, 0.7, -0.2])))
REF = np.log(Q)[None].astype(np.float32)


def exact_gradients():
    """Gradients by the logits of KL(π_θ ‖ π_ref) and of KL(π_ref ‖ π_θ), float64."""
    gap = np.log(P / Q)
    return P * (gap - (P * gap).sum()), P - Q


def _expected_gradient(term, theta, sampler_logits):
    """Σ_y π(y)·∇term(y): the gradient that averages over samples would converge to."""
    p = jax.nn.softmax(sampler_logits)
    jacobian = jax.jacobian(lambda t: term(jax.nn.log_softmax(t)[None])[0])(theta)
    return p @ jacobian


def test_expected_gradients_against_the_exact_divergences():
    reverse, forward = exact_gradients()

    @jax.jit
    def expected_gradients():
        of = lambda e: _expected_gradient(lambda x: kl.penalty(x, REF, MASK, e), THETA, THETA)
        return {e: of(e) for e in kl.ESTIMATORS}

    got = expected_gradients()
    np.testing.assert_allclose(got["k1"], 0, atol=1e-6)
    np.testing.assert_allclose(got["k3"], forward, atol=1e-6)
    for estimator in ("k2", "k1+", "k3+", "abs+"):
        np.testing.assert_allclose(got[estimator], reverse, atol=1e-6)


def test_importance_corrected_gradients_are_those_of_the_reverse_kl_also_off_policy():
    @jax.jit
    def corrected(sampler):
        old = jax.nn.log_softmax(sampler)[None]
        of = lambda e: _expected_gradient(lambda x: kl.importance_corrected(x, old, REF, MASK, e), THETA, sampler)
        return {e: of(e) for e in ("k1", "k3")}

    for sampler in (THETA, jnp.array([0.1, 0.1, 0.4])):
        for gradient in corrected(sampler).values():
            np.testing.assert_allclose(gradient, exact_gradients()[0], atol=1e-6)


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
