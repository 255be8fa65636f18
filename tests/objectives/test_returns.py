"""Token rewards, GAE and whitening by hand and against a float64 recursion; pads and tool tokens do not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import returns


def reference_gae(reward, value, mask, gamma, lam, bootstrap):
    """Backward recursion over the live tokens of one sequence, float64."""
    advantage, next_advantage, next_value = np.zeros(len(reward)), 0.0, bootstrap
    for t in np.flatnonzero(mask)[::-1]:
        delta = reward[t] + gamma * next_value - value[t]
        next_advantage = advantage[t] = delta + gamma * lam * next_advantage
        next_value = value[t]
    return advantage, np.where(mask, advantage + value, 0)


@pytest.mark.parametrize("pad", [9.0, np.nan, np.inf])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_score_lands_on_the_last_live_token(transform, pad):
    mask = jnp.array([[1, 1, 1, 0, 0]], bool)
    f = transform(lambda score, kl: returns.token_rewards(score, kl, mask, kl_coef=0.5))
    got = f(jnp.array([[2.0]]), jnp.array([[0.1, 0.2, 0.3, pad, pad]]))
    np.testing.assert_allclose(got, [[-0.05, -0.10, 1.85, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("pad", [9.0, np.nan, np.inf])
def test_gae_of_a_terminated_response_ignores_values_on_pads(pad):
    reward = jnp.array([[0, 0, 1, pad, pad]])
    value = jnp.array([[0.5, 0.6, 0.7, pad, pad]])
    mask = jnp.array([[1, 1, 1, 0, 0]], bool)
    advantage, target = jax.jit(lambda r, v: returns.gae(r, v, mask, gamma=0.9, lam=0.8))(reward, value)
    np.testing.assert_allclose(advantage, [[0.21712, 0.246, 0.3, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(target, [[0.71712, 0.846, 1.0, 0, 0]], atol=1e-6)


def test_gae_of_packed_rows_with_tool_tokens_and_truncation():
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=(2, 3, 12)).astype(np.float32)
    sequence = np.sort(rng.integers(0, 3, (3, 12)), axis=1)
    mask = rng.random((3, 12)) < 0.7
    bootstrap = np.where(rng.random((3, 3)) < 0.5, rng.normal(size=(3, 3)), 0).astype(np.float32)
    expected = np.zeros((2, 3, 12))
    for b in range(3):
        for s in range(3):
            own = mask[b] & (sequence[b] == s)
            expected[:, b] += reference_gae(reward[b], value[b], own, 0.95, 0.9, bootstrap[b, s])
    dirty = [np.where(mask, x, np.nan) for x in (reward, value)]
    f = jax.jit(lambda *a: returns.gae(*a[:3], gamma=0.95, lam=0.9, bootstrap_BS=a[3], sequence_BT=a[4]))
    got = f(*dirty, mask, bootstrap, sequence)
    np.testing.assert_allclose(np.stack(got), expected, atol=1e-5)


def test_truncation_bootstraps_and_termination_does_not():
    one = np.ones((2, 1), np.float32)
    bootstrap = np.array([[5.0], [0.0]], np.float32)
    f = jax.jit(lambda *a: returns.gae(*a, gamma=0.9, bootstrap_BS=bootstrap))
    advantage, _ = f(0 * one, one, one > 0)
    np.testing.assert_allclose(advantage, [[3.5], [-1.0]], rtol=1e-6)


def test_discounted_returns_restart_at_each_sequence():
    reward = jnp.array([[1.0, 2, 99, 4, 8, 16]])
    mask = jnp.array([[1, 1, 0, 1, 1, 1]], bool)
    sequence = jnp.array([[0, 0, 0, 0, 1, 1]])
    f = lambda r: returns.discounted_returns(r, mask, gamma=0.5, sequence_BT=sequence, num_sequences=2)
    got = jax.jit(f)(reward)
    np.testing.assert_array_equal(got, [[3, 4, 0, 4, 16, 16]])


@pytest.mark.parametrize("garbage", [0.0, 1e6, np.nan])
def test_whitening_takes_live_values_only_also_over_shards(garbage):
    x = jnp.array([[2, 4, garbage], [6, garbage, garbage]])
    mask = jnp.array([[1, 1, 0], [1, 0, 0]], bool)
    root = 1.224745
    np.testing.assert_allclose(returns.whiten(x, mask, ddof=0), [[-root, 0, 0], [root, 0, 0]], atol=1e-5)
    np.testing.assert_allclose(returns.whiten(x, mask), [[-1, 0, 0], [1, 0, 0]], atol=1e-5)
    np.testing.assert_allclose(returns.whiten(x, mask, shift_mean=False), [[3, 4, 0], [5, 0, 0]], atol=1e-5)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jnp.concatenate([x, jnp.full((2, 3), garbage)])
    mask = jnp.concatenate([mask, jnp.zeros((2, 3), bool)])
    sharded = jax.jit(returns.whiten)(*jax.device_put((x, mask), rows))
    np.testing.assert_allclose(sharded, [[-1, 0, 0], [1, 0, 0], [0] * 3, [0] * 3], atol=1e-5)
    np.testing.assert_array_equal(returns.whiten(x, mask & False), 0)


def test_reinforce_plus_plus_against_numpy():
    kl = jnp.array([[0.1, 0.3, 0.2, jnp.nan], [0.2, jnp.inf, 0.1, 0.4]])
    mask = jnp.array([[1, 1, 1, 0], [1, 0, 1, 1]], bool)
    score = jnp.array([[1.0], [0.0]])
    got = jax.jit(lambda s, kl, m: returns.reinforce_plus_plus(s, kl, m, kl_coef=0.1, gamma=0.5))(score, kl, mask)
    first = [-0.01 + 0.5 * (-0.03 + 0.5 * 0.98), -0.03 + 0.5 * 0.98, 0.98]
    second = [-0.02 + 0.5 * (-0.01 - 0.5 * 0.04), -0.01 - 0.5 * 0.04, -0.04]
    flat = np.array(first + second)
    flat = (flat - flat.mean()) / flat.std(ddof=1)
    np.testing.assert_allclose(np.asarray(got)[np.asarray(mask)], flat, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(got)[~np.asarray(mask)], 0)
