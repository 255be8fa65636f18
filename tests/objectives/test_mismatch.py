"""Rollout corrections against numpy on packed rows with garbage under the mask, and the metrics by formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import mismatch

SEQUENCE = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
MASK = np.array([[1, 1, 1, 1, 1, 0], [1, 0, 1, 0, 0, 0]], bool)
RATIO = np.array([[1.1, 0.9, 1.0, 3.0, 2.0, 9.0], [0.3, 9.0, 0.9, 9.0, 9.0, 9.0]])
OWNERS = [np.array([[1, 1, 1, 0, 0, 0], [0] * 6], bool), np.array([[0, 0, 0, 1, 1, 0], [0] * 6], bool)]
OWNERS.append(MASK & ~OWNERS[0] & ~OWNERS[1])
OLD = np.random.default_rng(0).uniform(-2, -1, (2, 6))
ARRAYS = [np.where(MASK, x, np.nan).astype(np.float32) for x in (OLD, OLD - np.log(RATIO))]
PACKED = {"sequence_BT": jnp.asarray(SEQUENCE), "num_sequences": 3}  # the third sequence is empty


def correct(f, **options):
    weight, keep = jax.jit(lambda *a: f(*a, **options))(*ARRAYS, jnp.asarray(MASK))
    np.testing.assert_array_equal(np.asarray(weight)[~np.asarray(keep)], 0)
    return np.asarray(weight), np.asarray(keep)


def per_sequence(f):
    """f(log-ratios of one sequence) on each of its tokens."""
    out = np.zeros((2, 6))
    for own in OWNERS:
        out[own] = f(np.log(RATIO[own]))
    return out


def test_token_weights():
    np.testing.assert_allclose(correct(mismatch.token_tis)[0], MASK * np.minimum(RATIO, 2), rtol=1e-5)
    weight, keep = correct(mismatch.token_tis, low=0.5, high=1.5)
    np.testing.assert_allclose(weight, MASK * np.clip(RATIO, 0.5, 1.5), rtol=1e-5)
    np.testing.assert_array_equal(keep, MASK)
    inside = MASK & (RATIO >= 0.5) & (RATIO <= 2.5)
    weight, keep = correct(mismatch.icepop, low=0.5, high=2.5)
    np.testing.assert_array_equal(keep, inside)
    np.testing.assert_allclose(weight, inside * RATIO, rtol=1e-5)


def test_sequence_weights():
    expected = per_sequence(lambda x: np.minimum(np.exp(x.sum()), 5))
    np.testing.assert_allclose(correct(mismatch.sequence_tis, **PACKED)[0], expected, rtol=1e-5)
    inside = per_sequence(lambda x: 0.9 <= np.exp(x.mean()) <= 1.1)
    np.testing.assert_array_equal(correct(mismatch.geometric, low=0.9, high=1.1, **PACKED)[0], inside)
    assert inside.sum() == 3
    inside = per_sequence(lambda x: 0.5 <= np.exp(x.mean()) <= 2)
    weight, keep = correct(mismatch.sequence_mask_tis, low=0.5, high=2, **PACKED)
    np.testing.assert_array_equal(keep, inside)
    np.testing.assert_allclose(weight, inside * RATIO, rtol=1e-5)
    assert inside.sum() == 5


ESTIMATE = {"k1": np.abs, "k2": lambda x: x**2 / 2, "k3": lambda x: np.exp(x) - 1 - x}


@pytest.mark.parametrize("estimator", list(ESTIMATE))
def test_kl_rejection(estimator):
    estimate = ESTIMATE[estimator]
    signed = (lambda x: x) if estimator == "k1" else estimate
    upper = 0.3
    expected = {
        "token": MASK & (estimate(np.log(RATIO)) <= upper),
        "seq_sum": per_sequence(lambda x: abs(signed(x).sum()) <= upper),
        "seq_mean": per_sequence(lambda x: abs(signed(x).mean()) <= upper),
        "seq_max": per_sequence(lambda x: estimate(x).max() <= upper),
    }
    for level, keep in expected.items():
        got = correct(mismatch.kl_rejection, estimator=estimator, level=level, upper=upper, **PACKED)
        np.testing.assert_array_equal(got[1], keep)
        np.testing.assert_array_equal(got[0], keep)
        assert 0 < keep.sum() < MASK.sum()


def test_batch_norm_factors_are_means_over_tokens_and_over_sequences():
    inputs = (*ARRAYS, jnp.asarray(MASK))
    factor = jax.jit(lambda *a: mismatch.batch_norm_factor(mismatch.token_tis(*a), by_sequence=False))(*inputs)
    np.testing.assert_allclose(factor, np.minimum(RATIO, 2)[MASK].mean(), rtol=1e-5)
    shared = lambda *a: mismatch.sequence_tis(*a, high=1.5, **PACKED)
    factor = jax.jit(lambda *a: mismatch.batch_norm_factor(shared(*a), **PACKED, by_sequence=True))(*inputs)
    np.testing.assert_allclose(factor, np.mean([min(RATIO[own].prod(), 1.5) for own in OWNERS]), rtol=1e-5)
    nothing = mismatch.Correction(jnp.zeros((1, 2)), jnp.zeros((1, 2), bool))
    assert mismatch.batch_norm_factor(nothing, by_sequence=False) == 1


def test_no_gradient_flows_through_a_weight():
    gradient = jax.grad(lambda old: mismatch.token_tis(old, ARRAYS[1], jnp.asarray(MASK)).weight.sum())(ARRAYS[0])
    np.testing.assert_array_equal(gradient, 0)


def test_divergence_metrics_by_formula():
    got = jax.jit(lambda *a: mismatch.divergence_metrics(*a, **PACKED))(*ARRAYS, jnp.asarray(MASK))
    log = np.log(RATIO)
    trainer = np.array([-OLD[own].mean() for own in OWNERS])
    rollout = np.array([-(OLD - log)[own].mean() for own in OWNERS])
    gap = trainer - rollout
    expected = {
        "kl": -log[MASK].mean(),
        "k3_kl": (RATIO - 1 - log)[MASK].mean(),
        "training_log_ppl": trainer.mean(),
        "training_ppl": np.exp(trainer).mean(),
        "rollout_log_ppl": rollout.mean(),
        "rollout_ppl": np.exp(rollout).mean(),
        "ppl_ratio": np.exp(gap).mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_diff_min": gap.min(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_abs_diff": np.abs(gap).mean(),
        "chi2_token": (RATIO**2)[MASK].mean() - 1,
        "chi2_seq": np.mean([np.exp(2 * log[own].sum()) for own in OWNERS]) - 1,
    }
    assert {k: float(v) for k, v in got.items()} == pytest.approx(
        {f"rollout_corr/{k}": v for k, v in expected.items()}, rel=1e-4
    )


def test_identical_policies_have_no_divergence():
    f = jax.jit(lambda old, mask: mismatch.divergence_metrics(old, old, mask, **PACKED))
    got = f(ARRAYS[0], MASK)
    zero = ("kl", "k3_kl", "log_ppl_diff", "log_ppl_diff_max", "log_ppl_abs_diff", "chi2_token", "chi2_seq")
    assert [float(got[f"rollout_corr/{k}"]) for k in zero] == [0] * 7
    assert got["rollout_corr/ppl_ratio"] == 1


def test_correction_metrics_by_formula():
    correction = mismatch.Correction(*correct(mismatch.icepop, low=0.5, high=2.5))
    f = jax.jit(lambda c: mismatch.correction_metrics(c, jnp.asarray(MASK), low=0.95, high=2.0 - 1e-4, **PACKED))
    got = f(correction)
    w = np.array([1.1, 0.9, 1.0, 2.0, 0.9])
    expected = {
        "rollout_is_mean": w.mean(),
        "rollout_is_std": w.std(),
        "rollout_is_min": 0.9,
        "rollout_is_max": 2.0,
        "rollout_is_eff_sample_size": w.mean() ** 2 / (w**2).mean(),
        "rollout_is_ratio_fraction_high": 1 / 5,
        "rollout_is_ratio_fraction_low": 2 / 5,
        "rollout_rs_masked_fraction": 2 / 7,
        "rollout_rs_seq_masked_fraction": 2 / 3,
    }
    assert {k: float(v) for k, v in got.items()} == pytest.approx(
        {f"rollout_corr/{k}": v for k, v in expected.items()}, rel=1e-4
    )
    nothing = f(correction._replace(keep=MASK & False))
    assert all(np.isfinite(v) for v in nothing.values())


def test_wrong_options_are_refused():
    args = (*ARRAYS, jnp.asarray(MASK))
    with pytest.raises(ValueError, match="low=3 must be below high=2"):
        mismatch.token_tis(*args, low=3, high=2)
    for options in ({"estimator": "k4", "level": "token"}, {"estimator": "k1", "level": "row"}):
        with pytest.raises(ValueError, match=r"k1, k2, k3.*seq_sum, seq_mean"):
            mismatch.kl_rejection(*args, upper=1.0, **options)
