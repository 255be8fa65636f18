"""Group advantages: numbers by hand, any order, equal groups, groups of one, missing rewards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives.advantages import group_advantages

REWARDS = np.array([1, 2, 3, 10, 20, 30], np.float32)
GROUPS = np.array([7, 7, 7, 4, 4, 4], np.int32)


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.jit(f, static_argnums=2)])
def test_hand_worked_groups(transform):
    centred = transform(group_advantages)(REWARDS, GROUPS, False)
    np.testing.assert_array_equal(centred, [-1, 0, 1, -10, 0, 10])
    scaled = transform(group_advantages)(REWARDS, GROUPS, True)
    np.testing.assert_allclose(scaled, [-1, 0, 1, -1, 0, 1], atol=2e-6)


def test_samples_of_a_group_need_not_be_neighbours():
    order = np.random.default_rng(0).permutation(6)
    shuffled = group_advantages(REWARDS[order], GROUPS[order], True)
    np.testing.assert_allclose(shuffled, np.asarray(group_advantages(REWARDS, GROUPS))[order], atol=1e-6)


def test_groups_computed_together_or_one_at_a_time_agree():
    together = group_advantages(REWARDS, GROUPS)
    apart = np.concatenate([group_advantages(REWARDS[:3], GROUPS[:3]), group_advantages(REWARDS[3:], GROUPS[3:])])
    np.testing.assert_array_equal(together, apart)
    stacked = jax.vmap(group_advantages)(REWARDS.reshape(2, 3), GROUPS.reshape(2, 3))
    np.testing.assert_allclose(stacked.reshape(6), together, atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_give_exactly_zero(normalize):
    rewards = np.concatenate([np.full(7, 0.1), np.full(3, 1e6 + 0.3), [0.0, 1.0, 0.0]]).astype(np.float32)
    groups = np.repeat([0, 1, 2], [7, 3, 3])
    advantages = group_advantages(rewards, groups, normalize)
    np.testing.assert_array_equal(advantages[:10], 0)
    assert advantages[11] > 0
    assert np.isfinite(advantages).all()


@pytest.mark.parametrize("normalize", [True, False])
def test_a_group_of_one_gets_zero(normalize):
    np.testing.assert_array_equal(group_advantages([5.0, -3.0], jnp.array([0, 1]), normalize), [0, 0])


@pytest.mark.parametrize("missing", [np.nan, np.inf, -np.inf])
def test_missing_rewards_stay_out_of_the_baseline(missing):
    rewards = np.array([1, missing, 3, missing, missing, 2], np.float32)
    groups = jnp.array([0, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(group_advantages(rewards, groups, False), [-1, 0, 1, 0, 0, 0])
    np.testing.assert_allclose(group_advantages(rewards, groups), [-1, 0, 1, 0, 0, 0], atol=2e-6)


def test_matches_float64_numpy_on_random_groups():
    rng = np.random.default_rng(3)
    rewards = rng.normal(5, 2, 40).astype(np.float32)
    groups = rng.integers(0, 6, 40)
    expected = np.zeros(40)
    for g in range(6):
        r = rewards[groups == g].astype(np.float64)
        expected[groups == g] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(group_advantages(rewards, groups), expected, atol=2e-6)
