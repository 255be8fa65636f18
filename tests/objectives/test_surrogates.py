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


def term_gradient(f, logp, *args, **options):
    return jax.grad(lambda x: f(x, *args, **options).term_BT.sum())(logp)


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
    gradient = term_gradient(surrogates.ppo_clip, *args, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    live = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0]])
    np.testing.assert_allclose(gradient, live * -ADVANTAGE[:, None] * r, rtol=1e-5)


def test_first_pass_on_policy_has_ratio_one_and_the_policy_gradient():
    logp, _, advantage, mask = grid()
    out = surrogates.ppo_clip(logp, logp, advantage, mask)
    np.testing.assert_array_equal(out.stats["ratio"], 1)
    np.testing.assert_array_equal(out.term_BT, -advantage)
    np.testing.assert_array_equal(term_gradient(surrogates.ppo_clip, logp, logp, advantage, mask), -advantage)


@pytest.mark.parametrize("bound", [0.0, 0.2])
def test_gradient_is_not_halved_at_the_clip_bounds(bound):
    one = jnp.ones((1, 1))
    gradient = term_gradient(surrogates.ppo_clip, 0 * one, 0 * one, one, one > 0, clip_low=bound, clip_high=bound)
    assert gradient == -1


def test_no_gradient_reaches_old_logp_or_advantage():
    logp, old, advantage, mask = grid()
    for argument in (1, 2):
        gradient = jax.grad(lambda *a: surrogates.ppo_clip(*a).term_BT.sum(), argument)(logp, old, advantage, mask)
        np.testing.assert_array_equal(gradient, 0)


def test_log_ratio_is_clamped_so_exp_stays_finite():
    logp = jnp.array([[0.0, -200.0]])
    out = surrogates.ppo_clip(logp, logp[:, ::-1], jnp.ones((1, 2)) * -1, jnp.ones((1, 2), bool), dual_clip=None)
    np.testing.assert_allclose(out.stats["ratio"], np.exp([[20.0, -20.0]]), rtol=1e-5)
    assert np.isfinite(out.term_BT).all()


def test_dual_clip_must_exceed_one():
    with pytest.raises(ValueError, match=r"dual_clip=0\.5"):
        surrogates.ppo_clip(*grid(), dual_clip=0.5)
