"""Group advantages: numbers by hand, any order, equal groups, groups of one, missing rewards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import advantages
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
    result = group_advantages(rewards, groups, normalize)
    np.testing.assert_array_equal(result[:10], 0)
    assert result[11] > 0
    assert np.isfinite(result).all()


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


R = np.array([1, 2, 6, 0, 0, 1, 4], np.float32)  # groups: three, three, one
G = np.array([3, 3, 3, 5, 5, 5, 9])
LENGTHS = np.array([1, 2, 3, 4, 5, 6, 7])


def test_leave_one_out_by_hand():
    expected = [1 - 4, 2 - 3.5, 6 - 1.5, -0.5, -0.5, 1, 0]
    np.testing.assert_allclose(advantages.leave_one_out(R, G), expected, rtol=1e-6)


def test_length_weighted_baseline_by_hand():
    first, second = (1 + 4 + 18) / 6, 6 / 15
    expected = [1 - first, 2 - first, 6 - first, -second, -second, 1 - second, 0]
    np.testing.assert_allclose(advantages.length_weighted(R, G, LENGTHS), expected, rtol=1e-6)


def test_pass_at_k_rewards_only_a_strict_best():
    f = jax.jit(advantages.pass_at_k)
    np.testing.assert_array_equal(f(R, G), [0, 0, 4, 0, 0, 1, 0])
    tied_and_missing = np.array([3, 3, np.nan, 3, np.nan, 1, np.nan], np.float32)
    np.testing.assert_array_equal(f(tied_and_missing, G), [0, 0, 0, 2, 0, 0, 0])


def test_maxrl_divides_by_the_mean():
    np.testing.assert_allclose(advantages.maxrl(R, G), [-2 / 3, -1 / 3, 1, -1, -1, 2, 0], rtol=1e-6)
    np.testing.assert_array_equal(advantages.maxrl(np.zeros(3, np.float32), np.zeros(3, int)), 0)


def test_gpg_makes_up_for_useless_groups():
    expected = np.array([-2, -1, 3, -1 / 3, -1 / 3, 2 / 3, 0]) * 7 / 6 / 0.5
    np.testing.assert_allclose(advantages.gpg(R, G, scale=0.5), expected, rtol=1e-6)


def test_remax_subtracts_the_greedy_reward():
    greedy = np.array([0, 1, 1, np.nan, 0, 0, 2], np.float32)
    np.testing.assert_array_equal(advantages.remax(R, greedy), [1, 1, 5, 0, 0, 1, 2])


@pytest.mark.parametrize("missing", [False, True])
def test_batch_statistics_match_float64_numpy(missing):
    rewards = np.append(R, np.nan) if missing else np.append(R, np.float32(3))
    groups, lengths = np.append(G, 9), np.append(LENGTHS, 2)
    present = np.isfinite(rewards)
    centred = np.zeros(8)
    for g in np.unique(groups):
        chosen = present & (groups == g)
        centred[chosen] = rewards[chosen] - rewards[chosen].astype(np.float64).mean()
    expected = np.where(present, centred / (rewards[present].astype(np.float64).std(ddof=1) + 1e-6), 0)
    np.testing.assert_allclose(advantages.batch_scaled(rewards, groups), expected, rtol=1e-5)
    tokens = np.repeat(centred[present], lengths[present])
    expected = np.where(present, (centred - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8), 0)
    got = advantages.reinforce_plus_plus_baseline(rewards, groups, lengths)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_gdpo_normalises_each_head_alone(transform):
    rewards = np.array([[1, 100], [2, 300], [3, 200], [0, np.nan], [1, 5], [np.nan, np.nan]], np.float32)
    groups, weights = np.array([0, 0, 0, 1, 1, 1]), np.array([1.0, 0.5])
    first, second = np.array([-1, 0, 1, -np.sqrt(0.5), np.sqrt(0.5)]), np.array([-1, 1, 0, 0, 0])
    total = first + 0.5 * second
    expected = np.append((total - total.mean()) / total.std(ddof=1), 0)
    np.testing.assert_allclose(transform(advantages.gdpo)(rewards, groups, weights), expected, atol=1e-5)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_gdpo_groups_without_signal_stay_exactly_zero(transform):
    """A group whose heads are all equal, a group of one, and a head that is constant beside one that is not."""
    rewards = np.array([[0.1, 7], [0.1, 7], [0.1, 7], [5, 5], [1, 3], [2, 3], [4, 3]], np.float32)
    groups = np.array([0, 0, 0, 1, 2, 2, 2])
    result = np.asarray(transform(advantages.gdpo)(rewards, groups, np.array([1.0, 10.0])))
    np.testing.assert_array_equal(result[:4], 0)
    head = (np.array([1, 2, 4]) - 7 / 3) / np.std([1, 2, 4], ddof=1)
    np.testing.assert_allclose(result[4:], head / np.std([0, 0, 0, 0, *head], ddof=1), rtol=1e-5)


@pytest.mark.parametrize(
    "f",
    [
        advantages.leave_one_out,
        advantages.batch_scaled,
        advantages.pass_at_k,
        advantages.maxrl,
        advantages.gpg,
        lambda r, g: advantages.length_weighted(r, g, jnp.arange(1, 5)),
        lambda r, g: advantages.reinforce_plus_plus_baseline(r, g, jnp.arange(1, 5)),
        lambda r, g: advantages.gdpo(r[:, None], g, jnp.ones(1)),
    ],
)
def test_equal_and_missing_rewards_are_exactly_zero_everywhere(f):
    result = jax.jit(f)(np.array([0.1, 0.1, 0.1, np.nan], np.float32), np.array([0, 0, 0, 1]))
    np.testing.assert_array_equal(result, 0)
