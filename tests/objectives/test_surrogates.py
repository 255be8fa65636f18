"""Policy losses against float64 numpy, their gradients by hand, and garbage under the mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import surrogates

LOG_RATIO = np.log([0.5, 0.9, 1.0, 1.1, 1.25, 1.5, 5.0])
ADVANTAGE = np.array([2.0, -3.0])


def grid():
    """Every ratio with a positive (row 0) and a negative (row 1) advantage."""
    old = np.random.default_rng(0).uniform(-3, -1, (2, 7))
    logp = old + LOG_RATIO
    return (
        jnp.asarray(logp, jnp.float32),
        jnp.asarray(old, jnp.float32),
        jnp.asarray(np.repeat(ADVANTAGE[:, None], 7, 1), jnp.float32),
        jnp.ones((2, 7), bool),
    )


RATIO = np.exp(LOG_RATIO)
SIGN = ADVANTAGE[:, None]


def value_and_gradient(f, args, **options):
    """Terms, statistics and d(Σ term)/d(logp), compiled."""
    logp, *rest = args

    def total(logp):
        out = f(logp, *rest, **options)
        return out.term_BT.sum(), out

    (_, out), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(logp)
    return np.asarray(out.term_BT), {k: np.asarray(v) for k, v in out.stats.items()}, np.asarray(gradient)


def test_ppo_clip_values_gradients_and_statistics():
    r = np.exp(LOG_RATIO)
    args = grid()
    out = surrogates.ppo_clip(*args, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    plain = np.maximum(-2 * r, -2 * np.clip(r, 0.8, 1.28)), np.maximum(3 * r, 3 * np.clip(r, 0.8, 1.28))
    np.testing.assert_allclose(out.term_BT, [plain[0], np.minimum(plain[1], 9)], rtol=1e-5)
    np.testing.assert_array_equal(out.stats["clipped_high"], [[0, 0, 0, 0, 0, 1, 1], [0] * 7])
    np.testing.assert_array_equal(out.stats["clipped_low"], [[0] * 7, [1, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(out.stats["clipped_dual"], [[0] * 7, [0, 0, 0, 0, 0, 0, 1]])
    np.testing.assert_allclose(out.stats["ratio"], [r, r], rtol=1e-5)
    np.testing.assert_allclose(out.stats["kl_to_old"], [-LOG_RATIO, -LOG_RATIO], atol=1e-6)
    _, _, gradient = value_and_gradient(surrogates.ppo_clip, args, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    live = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0]])
    np.testing.assert_allclose(gradient, live * -ADVANTAGE[:, None] * r, rtol=1e-5)


def test_first_pass_on_policy_has_ratio_one_and_the_policy_gradient():
    logp, _, advantage, mask = grid()
    term, stats, gradient = value_and_gradient(surrogates.ppo_clip, (logp, logp, advantage, mask))
    np.testing.assert_array_equal(stats["ratio"], 1)
    np.testing.assert_array_equal(term, -advantage)
    np.testing.assert_array_equal(gradient, -advantage)


@pytest.mark.parametrize("bound", [0.0, 0.2])
def test_gradient_is_not_halved_at_the_clip_bounds(bound):
    one = np.ones((1, 1), np.float32)
    args = (0 * one, 0 * one, one, one > 0)
    _, _, gradient = value_and_gradient(surrogates.ppo_clip, args, clip_low=bound, clip_high=bound)
    assert gradient == -1


def test_no_gradient_reaches_old_logp_or_advantage():
    logp, old, advantage, mask = grid()
    gradients = jax.jit(jax.grad(lambda *a: surrogates.ppo_clip(*a).term_BT.sum(), (1, 2)))(logp, old, advantage, mask)
    np.testing.assert_array_equal(gradients, 0)


def test_log_ratio_is_clamped_so_exp_stays_finite():
    logp = np.array([[0.0, -200.0]], np.float32)
    args = (logp, logp[:, ::-1], -np.ones((1, 2), np.float32), np.ones((1, 2), bool))
    term, stats, gradient = value_and_gradient(surrogates.ppo_clip, args)
    np.testing.assert_allclose(stats["ratio"], np.exp([[20.0, -20.0]]), rtol=1e-5)
    assert np.isfinite(term).all()
    np.testing.assert_array_equal(gradient, 0)


def test_dual_clip_must_exceed_one():
    with pytest.raises(ValueError, match=r"dual_clip=0\.5"):
        surrogates.ppo_clip(*grid(), dual_clip=0.5)


def test_two_sided_clip_caps_the_ratio_of_negative_tokens_only():
    term, _, gradient = value_and_gradient(surrogates.two_sided_clip, grid(), delta=1.4)
    capped = np.minimum(RATIO, 1.4)
    expected = [np.maximum(-a * capped, -a * np.clip(RATIO, 0.8, 1.2)) for a in ADVANTAGE]
    np.testing.assert_allclose(term, expected, rtol=1e-5)
    np.testing.assert_array_equal(gradient != 0, [[1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0]])
    with pytest.raises(ValueError, match=r"delta=1\.1"):
        surrogates.two_sided_clip(*grid(), delta=1.1)


def test_policy_gradient():
    args = grid()
    term, _, gradient = value_and_gradient(surrogates.policy_gradient, args)
    np.testing.assert_allclose(term, -SIGN * args[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, -args[2], rtol=1e-6)


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    args = grid()
    for options, weight in (
        ({}, np.clip(RATIO, 0, 5)),
        ({"clip_low": 0.2, "clip_high": 0.28}, np.clip(RATIO, 0.8, 1.28)),
    ):
        term, stats, gradient = value_and_gradient(surrogates.cispo, args, **options)
        np.testing.assert_allclose(term, -weight * SIGN * args[0], rtol=1e-5)
        np.testing.assert_allclose(gradient, -weight * SIGN, rtol=1e-5)
    np.testing.assert_array_equal(stats["clipped_high"], [[0, 0, 0, 0, 0, 1, 1]] * 2)
    np.testing.assert_array_equal(stats["clipped_low"], [[1, 0, 0, 0, 0, 0, 0]] * 2)


def test_sapo_gates_softly():
    tau = np.array([[1.0], [1.05]])
    gate = 1 / (1 + np.exp(-tau * (RATIO - 1)))
    term, _, gradient = value_and_gradient(surrogates.sapo, grid())
    np.testing.assert_allclose(term, -SIGN * 4 / tau * gate, rtol=1e-5)
    np.testing.assert_allclose(gradient, -SIGN * 4 * gate * (1 - gate) * RATIO, rtol=1e-5)
    np.testing.assert_allclose(gradient[:, 2], -ADVANTAGE, rtol=1e-5)


P_OLD = np.array([0.1, 0.5, 0.5, 0.5, 0.9, 0.001])
P_NEW = np.array([0.4, 0.75, 0.4, 0.2, 0.6, 0.05])


def probabilities():
    logp, old = (np.repeat(np.log(p)[None], 2, 0).astype(np.float32) for p in (P_NEW, P_OLD))
    return jnp.asarray(logp), jnp.asarray(old), jnp.asarray(np.repeat(SIGN, 6, 1), jnp.float32), jnp.ones((2, 6), bool)


def binary_kl(p, q):
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


@pytest.mark.parametrize(
    ("f", "options", "high", "low"),
    [
        (surrogates.dppo_tv, {"delta_low": 0.25}, P_NEW - P_OLD > 0.2, P_NEW - P_OLD < -0.25),
        (
            surrogates.dppo_kl,
            {"delta": 0.06},
            (binary_kl(P_OLD, P_NEW) > 0.06) & (P_NEW > P_OLD),
            (binary_kl(P_OLD, P_NEW) > 0.06) & (P_NEW < P_OLD),
        ),
    ],
)
def test_dppo_drops_tokens_that_left_the_region_by_their_own_pull(f, options, high, low):
    args = probabilities()
    keep = np.stack([~high, ~low])
    assert 0 < high.sum() < 4
    assert low.any()
    weight = np.minimum(P_NEW / P_OLD, 20)
    term, stats, gradient = value_and_gradient(f, args, **options)
    np.testing.assert_allclose(term, keep * -SIGN * weight * np.log(P_NEW), rtol=1e-5)
    np.testing.assert_allclose(gradient, keep * -SIGN * weight, rtol=1e-5)
    np.testing.assert_array_equal(stats["clipped_high"], [high, 0 * high])
    np.testing.assert_array_equal(stats["clipped_low"], [0 * low, low])


def test_dro_pulls_quadratically():
    args = grid()
    term, _, gradient = value_and_gradient(surrogates.dro, args, beta=0.5)
    np.testing.assert_allclose(term, -SIGN * np.asarray(args[0]) + 0.25 * LOG_RATIO**2, rtol=1e-5)
    np.testing.assert_allclose(gradient, -SIGN + 0.5 * LOG_RATIO, rtol=1e-5, atol=1e-6)


def test_ratio_leaves_one_only_after_an_update_and_stored_logp_stays():
    """Two passes over two mini-batches of a softmax policy with a large learning rate."""
    rng = np.random.default_rng(0)
    action = jnp.asarray(rng.integers(0, 3, (2, 1, 8)))
    advantage = jnp.asarray(rng.normal(size=(2, 1, 8)), jnp.float32)
    mask = jnp.ones((1, 8), bool)
    log_policy = lambda theta, a: jax.nn.log_softmax(theta)[a]

    @jax.jit
    def step(theta, action, old, advantage):
        def loss(theta):
            out = surrogates.ppo_clip(log_policy(theta, action), old, advantage, mask, clip_low=0.9, clip_high=9.0)
            return out.term_BT.mean(), out.stats["ratio"]

        (value, ratio), gradient = jax.value_and_grad(loss, has_aux=True)(theta)
        return theta - 2.0 * gradient, value, ratio, gradient

    theta = jnp.zeros(3)
    old = log_policy(theta, action)
    before = np.asarray(old).copy()
    for iteration in range(2):
        for batch in range(2):
            expected = np.exp(np.asarray(log_policy(theta, action[batch]) - before[batch], np.float64))
            theta, value, ratio, gradient = step(theta, action[batch], old[batch], advantage[batch])
            np.testing.assert_allclose(ratio, expected, rtol=1e-5)
            if iteration == batch == 0:
                np.testing.assert_allclose(ratio, 1, atol=1e-5)
                assert float(value) == pytest.approx(-float(advantage[0].mean()), rel=1e-5)
                assert np.abs(gradient).max() > 0.01
            else:
                assert np.abs(np.asarray(ratio) - 1).max() > 0.05
    np.testing.assert_array_equal(old, before)
