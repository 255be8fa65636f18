"""Sequence-level losses against float64 numpy, packed and one sequence a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import reductions, sequence_surrogates

SEQUENCE = np.array([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2, 2]])
MASK = np.array([[1, 1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1, 0]], bool)
OWNERS = [(b, MASK[b] & (SEQUENCE[b] == s)) for b in range(2) for s in range(3) if (SEQUENCE[b] == s).any()]
ADVANTAGE = np.array([1.5, -2.0, -1.0, 0.5, 2.0])
SHIFT = np.array([0.3, -0.3, 0.2, -0.2, 0.0])  # of a sequence's mean log-ratio: the first two are clipped


def inputs(spread=0.1):
    rng = np.random.default_rng(0)
    old = rng.uniform(-2, -0.5, (2, 8))
    logp = old + rng.normal(0, spread, (2, 8))
    advantage = np.zeros((2, 8))
    for a, shift, (b, own) in zip(ADVANTAGE, SHIFT, OWNERS, strict=True):
        advantage[b, own] = a
        logp[b, own] += shift
    return [np.where(MASK, x, np.nan).astype(np.float32) for x in (logp, old, advantage)]


def evaluate(f, arrays, weight=None, **options):
    """Terms, statistics, and the gradient of Σ weight·term; compiled."""
    mask = jnp.asarray(MASK)
    weight = jnp.ones((2, 8)) if weight is None else jnp.asarray(weight, jnp.float32)

    @jax.jit
    def total(logp, old, advantage):
        out = f(logp, old, advantage, mask, sequence_BT=jnp.asarray(SEQUENCE), num_sequences=3, **options)
        return reductions.weighted_sum(out.term_BT, mask, weight), out

    (_, out), gradient = jax.value_and_grad(total, has_aux=True)(*arrays)
    return np.asarray(out.term_BT), out.stats, np.asarray(gradient)


def sequence_mean_weights():
    weight = np.zeros((2, 8))
    for b, own in OWNERS:
        weight[b, own] = 1 / (len(OWNERS) * own.sum())
    return weight


def test_gspo_ratio_is_the_geometric_mean_and_clips_whole_sequences():
    logp, old, advantage = inputs()
    expected, ratios = np.zeros((2, 8)), []
    for a, (b, own) in zip(ADVANTAGE, OWNERS, strict=True):
        s = np.exp((logp[b, own] - old[b, own]).astype(np.float64).mean())
        ratios.append(s)
        expected[b, own] = max(-a * s, -a * np.clip(s, 0.9, 1.1))
    for level in ("token", "sequence"):
        term, stats, _ = evaluate(
            sequence_surrogates.gspo, (logp, old, advantage), clip_low=0.1, clip_high=0.1, level=level
        )
        np.testing.assert_allclose(term, expected, rtol=1e-5)
        np.testing.assert_allclose(stats["ratio"][0, :3], ratios[0], rtol=1e-5)
    clipped = [(a > 0 and s > 1.1) or (a < 0 and s < 0.9) for a, s in zip(ADVANTAGE, ratios, strict=True)]
    assert clipped == [True, True, False, False, False]


def test_gspo_levels_share_value_and_gradient_under_equal_weights():
    arrays = inputs()
    options = {"weight": sequence_mean_weights(), "clip_low": 0.1, "clip_high": 0.1}
    term_t, _, gradient_t = evaluate(sequence_surrogates.gspo, arrays, level="token", **options)
    term_s, _, gradient_s = evaluate(sequence_surrogates.gspo, arrays, level="sequence", **options)
    np.testing.assert_allclose(term_t, term_s, rtol=1e-5)
    np.testing.assert_allclose(gradient_t, gradient_s, rtol=1e-5, atol=1e-8)
    assert (gradient_t != 0).any()
    _, _, token = evaluate(sequence_surrogates.gspo, arrays, clip_low=9, clip_high=9, level="token")
    b, own = OWNERS[0]
    s = np.exp((arrays[0] - arrays[1])[b, own].mean())
    np.testing.assert_allclose(token[b, own], -ADVANTAGE[0] * s, rtol=1e-5)


def test_gmpo_bounds_each_log_ratio_before_the_geometric_mean():
    logp, old, advantage = inputs(spread=0.6)
    weight = sequence_mean_weights()
    expected, gradient_expected = np.zeros((2, 8)), np.zeros((2, 8))
    for a, (b, own) in zip(ADVANTAGE, OWNERS, strict=True):
        delta = (logp - old)[b, own].astype(np.float64)
        bounded = np.minimum(delta, 0.4) if a > 0 else np.maximum(delta, -0.4)
        ratio = np.exp(bounded.mean())
        expected[b, own] = -a * ratio
        gradient_expected[b, own] = -a * ratio * (bounded == delta) / own.sum() / len(OWNERS)
    term, stats, gradient = evaluate(sequence_surrogates.gmpo, (logp, old, advantage), weight=weight)
    np.testing.assert_allclose(term, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, gradient_expected, rtol=1e-5)
    np.testing.assert_array_equal((stats["clipped_high"] + stats["clipped_low"])[MASK], gradient_expected[MASK] == 0)
    assert 0 < (gradient_expected[MASK] == 0).sum() < MASK.sum()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_topr_truncates_the_weight_of_negatives(level):
    logp, old, advantage = inputs()
    weight = np.zeros((2, 8))
    for a, (b, own) in zip(ADVANTAGE, OWNERS, strict=True):
        delta = (logp - old)[b, own].astype(np.float64)
        ratio = np.exp(delta.sum() if level == "sequence" else delta)
        weight[b, own] = 1 if a > 0 else np.minimum(ratio, 1)
    term, _, gradient = evaluate(sequence_surrogates.topr, (logp, old, advantage), level=level)
    clean_logp, clean_advantage = np.where(MASK, logp, 0), np.where(MASK, advantage, 0)
    np.testing.assert_allclose(term, -clean_advantage * weight * clean_logp, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient, -clean_advantage * weight, rtol=1e-5, atol=1e-7)
    assert (weight[MASK] < 1).any()


def test_off_policy_sequences_with_negative_advantage_are_dropped():
    logp, old, advantage = inputs()
    sequences = {"sequence_BT": jnp.asarray(SEQUENCE), "num_sequences": 3}
    f = lambda *a: sequence_surrogates.off_policy_keep(*a, delta=0.05, **sequences)
    keep = jax.jit(f)(logp, old, advantage, MASK)
    expected = np.zeros((2, 8))
    for a, (b, own) in zip(ADVANTAGE, OWNERS, strict=True):
        expected[b, own] = a > 0 or (old - logp)[b, own].mean() <= 0.05
    np.testing.assert_array_equal(keep, expected)
    assert 0 < expected[MASK].sum() < MASK.sum()


def test_packed_rows_equal_one_sequence_a_row():
    logp, old, advantage = inputs()
    one_a_row = jax.jit(sequence_surrogates.gspo)
    packed, _, _ = evaluate(sequence_surrogates.gspo, (logp, old, advantage))
    for b, own in OWNERS:
        rows = [np.where(own, x[b], np.inf)[None] for x in (logp, old, advantage)]
        alone = one_a_row(*rows, own[None])
        np.testing.assert_allclose(np.asarray(alone.term_BT)[0, own], packed[b, own], rtol=1e-6)


def test_unknown_level_is_refused():
    arrays = [jnp.zeros((1, 2))] * 3
    for f in (sequence_surrogates.gspo, sequence_surrogates.topr):
        with pytest.raises(ValueError, match=r"level='row'.*token or sequence"):
            f(*arrays, jnp.ones((1, 2), bool), level="row")
