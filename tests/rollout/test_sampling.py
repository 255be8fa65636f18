"""The distribution drawn from: values by hand and in float64 numpy, frequencies by a chi-square test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.rollout.sampling import Features, Sampling, blocks, draw, inverse_cdf, keep_top_k, keep_top_p, uniforms


def options(rows, temperature=1.0, top_k=0, top_p=1.0):
    full = lambda value, dtype: jnp.full((rows,), value, dtype)
    return Sampling(full(temperature, jnp.float32), full(top_k, jnp.int32), full(top_p, jnp.float32))


def drawn(logits_V, rows, seed=0, **kw):
    """`rows` draws from one row of logits."""
    logits = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (rows, len(logits_V)))
    opts = options(rows, **kw)
    return draw(logits, opts, jax.random.uniform(jax.random.key(seed), (rows, 2)), Features.of(opts))


def reference(logits_V, temperature=1.0, top_k=0, top_p=1.0):
    """Probabilities by sorting, float64: temperature, then top-k, then top-p of the renormalised rest."""
    z = np.asarray(logits_V, np.float64) / temperature
    order = np.argsort(-z, kind="stable")
    keep = np.ones(len(z), bool)
    if top_k:
        keep &= z >= z[order[top_k - 1]]
    p = np.where(keep, np.exp(z - z.max()), 0)
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        needed = np.searchsorted(np.cumsum(p[order]), top_p) + 1
        p = np.where(p >= p[order[needed - 1]], p, 0)
        p /= p.sum()
    return p


def test_temperature_half_gives_the_tempered_and_the_raw_log_probability():
    out = drawn([2.0, 1.0, 0.0, -1.0], 4000, temperature=0.5)
    ones = np.asarray(out.token) == 1
    assert ones.sum() > 300
    np.testing.assert_allclose(np.asarray(out.logp)[ones], -2.145078, atol=1e-5)
    np.testing.assert_allclose(np.asarray(out.raw_logp)[ones], -1.440190, atol=1e-5)


@pytest.mark.parametrize("kw", [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.6}])
def test_draws_follow_the_distribution_and_report_its_log_probability(kw):
    logits = np.random.default_rng(0).normal(size=600) * 2  # more than two blocks, the last one ragged
    p = reference(logits, **kw)
    out = drawn(logits, 20_000, **kw)
    token = np.asarray(out.token)
    np.testing.assert_allclose(np.exp(np.asarray(out.logp, np.float64)), p[token], rtol=2e-5)
    count = np.bincount(token, minlength=600)
    assert count[p == 0].sum() == 0
    expected = p * len(token)
    common = expected > 5
    chi2 = (((count - expected) ** 2)[common] / expected[common]).sum()
    degrees = max(common.sum() - 1, 1)
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees)


def test_a_token_rarer_than_one_uniforms_resolution_is_still_drawn():
    """1e-9 of the mass, far below float32's 6e-8: reached through its block, which holds 2e-6."""
    mass = jnp.zeros((1, 768)).at[0, 0].set(1.0).at[0, 600:603].set(jnp.array([1e-6, 1e-6, 1e-9]))
    token, _ = inverse_cdf(mass, jnp.array([[1 - 2**-21, 0.9999]], jnp.float32))
    assert int(token[0]) == 602


@pytest.mark.parametrize(("size", "expected"), [(49152, 256), (151936, 128), (128256, 256), (98, 2), (97, 1)])
def test_blocks_are_a_power_of_two_that_divides_the_vocabulary(size, expected):
    assert blocks(size) == expected


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
def test_a_token_without_mass_never_comes(u):
    mass = jnp.zeros((1, 1000)).at[0, 517].set(2.0)
    token, total = inverse_cdf(mass, jnp.full((1, 2), u, jnp.float32))
    assert (int(token[0]), float(total[0])) == (517, 2.0)


def test_top_k_keeps_ties_and_zero_keeps_all():
    scores = jnp.array([[3.0, 1.0, 2.0, 2.0], [3.0, 1.0, 2.0, 2.0], [-1.0, -3.0, -2.0, -np.inf]])
    kept = np.isfinite(np.asarray(keep_top_k(scores, jnp.array([2, 0, 1]))))
    np.testing.assert_array_equal(kept, [[1, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]])


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    scores = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]] * 4))
    kept = np.isfinite(np.asarray(keep_top_p(scores, jnp.array([0.49, 0.51, 0.9, 1.0]))))
    np.testing.assert_array_equal(kept, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])


def test_greedy_is_the_argmax_with_log_probability_zero_and_mixes_with_sampling():
    logits = jnp.array([[0.0, 5.0, 1.0]] * 2)
    opts = Sampling(jnp.array([0.0, 1.0]), jnp.zeros(2, jnp.int32), jnp.ones(2))
    out = draw(logits, opts, jnp.full((2, 2), 0.0), Features.of(opts))
    assert np.asarray(out.token).tolist() == [1, 0]
    assert float(out.logp[0]) == 0.0
    np.testing.assert_allclose(out.logp[1], -np.log(np.exp([0.0, 5.0, 1.0]).sum()), rtol=1e-5)
    np.testing.assert_allclose(out.raw_logp[0], 5 - np.log(np.exp([0.0, 5.0, 1.0]).sum()), rtol=1e-4)


def test_uniforms_depend_on_the_four_keys_only():
    arange = jnp.arange(6)
    base = uniforms(jnp.zeros(6, jnp.uint32), jnp.int32(3), arange, arange)
    shuffled = uniforms(jnp.zeros(6, jnp.uint32), jnp.int32(3), arange[::-1], arange[::-1])
    np.testing.assert_array_equal(base, shuffled[::-1])
    for other in [
        uniforms(jnp.ones(6, jnp.uint32), jnp.int32(3), arange, arange),
        uniforms(jnp.zeros(6, jnp.uint32), jnp.int32(4), arange, arange),
        uniforms(jnp.zeros(6, jnp.uint32), jnp.int32(3), arange + 1, arange),
        uniforms(jnp.zeros(6, jnp.uint32), jnp.int32(3), arange, arange + 1),
    ]:
        assert (np.asarray(other) != np.asarray(base)).all()
