"""Preference losses: numbers by hand, float64 numpy, gradients by finite differences, garbage under the mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import preference as pref

MASK = np.array([1, 1, 0, 1], bool)
PAIRS = np.array(
    [[-10, -3, -1, -5], [-14, -2, -1, -9], [-11, -3.5, -1, -5], [-13, -4, -1, -9]], np.float64
)  # chosen, rejected, reference chosen, reference rejected
C, R = PAIRS[0] - PAIRS[2], PAIRS[1] - PAIRS[3]
BETA = 0.3
MEANS = np.array([[-0.3, -1.2, -0.5, -0.01], [-0.9, -0.7, -0.5, -3.0]])
LENGTHS = np.array([[5, 2, 1, 4], [7, 1, 1, 3]])


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_odds(x):
    return x - np.log(1 - np.exp(x))


H = BETA * (C - R)
EXO_P, EXO_Q = np.stack([sigmoid(H), sigmoid(-H)]), np.array([[1 - 1e-3], [1e-3]])
GAP = MEANS[0] - MEANS[1]
GOOD = np.array([1, 0, 1, 0], bool)


def pairwise(f, **options):
    return lambda chosen, rejected, mask: f(pref.Pair(chosen, rejected, *map(jnp.asarray, PAIRS[2:])), mask, **options)


def divergent(divergence, **options):
    def loss(chosen, rejected, mask):
        pair = pref.Pair(chosen, rejected, *map(jnp.asarray, PAIRS[2:]))
        return pref.dpo(pref.divergence_scores(pair, mask, divergence=divergence, **options), mask, beta=BETA)

    return loss


LOSSES = {  # name: (loss of the two policy columns and the mask, those columns, float64 value)
    "dpo": (pairwise(pref.dpo, beta=BETA), PAIRS, -log_sigmoid(H)),
    "cdpo": (
        pairwise(pref.dpo, beta=BETA, label_smoothing=0.2),
        PAIRS,
        -0.8 * log_sigmoid(H) - 0.2 * log_sigmoid(-H),
    ),
    "robust": (
        pairwise(pref.robust_dpo, beta=BETA, label_smoothing=0.2),
        PAIRS,
        (-0.8 * log_sigmoid(H) + 0.2 * log_sigmoid(-H)) / 0.6,
    ),
    "hinge": (pairwise(pref.hinge, beta=BETA), PAIRS, np.maximum(0, 1 - H)),
    "ipo": (pairwise(pref.ipo, beta=BETA), PAIRS, (C - R - 1 / (2 * BETA)) ** 2),
    "ipo by length": (
        pairwise(pref.ipo, beta=BETA, chosen_length_N=LENGTHS[0], rejected_length_N=LENGTHS[1]),
        PAIRS,
        (C / LENGTHS[0] - R / LENGTHS[1] - 1 / (2 * BETA)) ** 2,
    ),
    "exo": (pairwise(pref.exo, beta=BETA), PAIRS, (EXO_P * np.log(EXO_P / EXO_Q)).sum(0)),
    "nca": (
        pairwise(pref.nca, beta=BETA),
        PAIRS,
        -log_sigmoid(BETA * C) - (log_sigmoid(-BETA * C) + log_sigmoid(-BETA * R)) / 2,
    ),
    "bco": (
        pairwise(pref.bco, beta=BETA, shift=0.1),
        PAIRS,
        -log_sigmoid(BETA * C - 0.1) - log_sigmoid(-(BETA * R - 0.1)),
    ),
    "sppo": (pairwise(pref.sppo, beta=BETA), PAIRS, (C - 0.5 / BETA) ** 2 + (R + 0.5 / BETA) ** 2),
    "apo_zero": (pairwise(pref.apo_zero, beta=BETA), PAIRS, 1 - sigmoid(BETA * C) + sigmoid(BETA * R)),
    "apo_down": (pairwise(pref.apo_down, beta=BETA), PAIRS, sigmoid(BETA * C) + 1 - sigmoid(H)),
    "discopop": (
        pairwise(pref.discopop, beta=BETA, tau=0.7),
        PAIRS,
        -(1 - sigmoid(H / 0.7)) * log_sigmoid(H) + sigmoid(H / 0.7) * np.exp(-H),
    ),
    "forward KL": (divergent("forward_kl"), PAIRS, -log_sigmoid(BETA * (np.exp(-R) - np.exp(-C)))),
    "Jensen-Shannon": (divergent("js"), PAIRS, -log_sigmoid(BETA * (log_sigmoid(C) - log_sigmoid(R)))),
    "alpha": (
        divergent("alpha", alpha=0.3),
        PAIRS,
        -log_sigmoid(BETA * (np.exp(-0.7 * C) - np.exp(-0.7 * R)) / -0.7),
    ),
    "alpha 1 is reverse KL": (divergent("alpha", alpha=1.0), PAIRS, -log_sigmoid(H)),
    "reverse KL": (divergent("reverse_kl"), PAIRS, -log_sigmoid(H)),
    "kto": (
        lambda logp, _, mask: pref.kto(
            logp, PAIRS[2], GOOD, mask, reference_point=0.2, beta=BETA, desirable_weight=2.0, undesirable_weight=3.0
        ),
        PAIRS,
        np.where(GOOD, 2 * (1 - sigmoid(BETA * (C - 0.2))), 3 * (1 - sigmoid(BETA * (0.2 - C)))),
    ),
    "orpo": (
        lambda c, r, mask: pref.orpo(c, r, mask, weight=0.4),
        MEANS,
        -MEANS[0] - 0.4 * log_sigmoid(log_odds(MEANS[0]) - log_odds(MEANS[1])),
    ),
    "simpo": (
        lambda c, r, mask: pref.simpo(c, r, mask, beta=2.0, gamma=0.5),
        MEANS,
        -log_sigmoid(2 * GAP - 0.5),
    ),
    "cpo": (
        lambda c, r, mask: pref.cpo(c, r, LENGTHS[0], mask, beta=BETA, alpha=0.5),
        PAIRS,
        -log_sigmoid(BETA * (PAIRS[0] - PAIRS[1])) - 0.5 * PAIRS[0] / LENGTHS[0],
    ),
    "bradley-terry": (
        lambda c, r, mask: pref.bradley_terry(c, r, mask, margin_N=jnp.full(4, 0.3), centring=0.01),
        MEANS,
        -log_sigmoid(GAP - 0.3) + 0.01 * (MEANS[0] + MEANS[1]) ** 2,
    ),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_value_gradient_and_bits_under_the_mask(name):
    f, columns, expected = LOSSES[name]
    mask = jnp.asarray(MASK)

    def total(chosen, rejected):
        loss = f(chosen, rejected, mask)
        return loss.sum(), loss

    g = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    x = columns[:2].astype(np.float32)
    clean = g(*np.where(MASK, x, 0))
    np.testing.assert_allclose(clean[0][1], np.where(MASK, expected, 0), rtol=2e-5)
    for garbage in (np.nan, np.inf, -np.inf, 1e30):
        jax.tree.map(np.testing.assert_array_equal, g(*np.where(MASK, x, np.float32(garbage))), clean)
    for i in range(2):
        shift = np.zeros((2, 1), np.float32)
        shift[i] = 5e-3
        slope = (np.asarray(g(*(x + shift))[0][1], np.float64) - np.asarray(g(*(x - shift))[0][1])) / 1e-2
        np.testing.assert_allclose(clean[1][i], slope * MASK, rtol=2e-2, atol=3e-3)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_dpo_by_hand(transform, padding):
    pad = lambda *x: jnp.concatenate([jnp.array(x, jnp.float32), jnp.full(padding, jnp.nan)])
    pair = pref.Pair(pad(-10), pad(-14), pad(-11), pad(-13))
    mask = jnp.arange(1 + padding) < 1
    loss = transform(lambda p, m: pref.dpo(p, m, beta=0.1))
    assert float(loss(pair, mask).sum()) == pytest.approx(0.598139, abs=1e-6)
    smooth = transform(lambda p, m: pref.dpo(p, m, beta=0.1, label_smoothing=0.1))
    assert float(smooth(pair, mask).sum()) == pytest.approx(0.618139, abs=1e-6)
    same = pair._replace(chosen=pair.ref_chosen, rejected=pair.ref_rejected)
    assert loss(same, mask)[0] == np.float32(np.log(2))
    stats = pref.reward_stats(pair, mask, beta=0.1)
    assert {k: float(v[0]) for k, v in stats.items()} == pytest.approx(
        {"chosen": 0.1, "rejected": -0.1, "margin": 0.2, "accuracy": 1.0}, rel=1e-5
    )


def test_the_reference_gets_no_gradient():
    pair = pref.Pair(*map(jnp.asarray, PAIRS.astype(np.float32)))
    gradient = jax.grad(lambda p: pref.dpo(p, jnp.asarray(MASK)).sum())(pair)
    np.testing.assert_array_equal(gradient.ref_chosen, 0)
    np.testing.assert_array_equal(gradient.ref_rejected, 0)
    assert (gradient.chosen[0] < 0) & (gradient.rejected[0] > 0)


def test_kto_reference_point_is_a_clamped_mean_of_live_answers():
    mask = jnp.asarray(MASK)
    policy = jnp.array([-1.0, -2, jnp.nan, -3])
    assert pref.kto_reference_point(policy, policy - jnp.array([1.0, 2, 50, 3]), mask) == 2
    assert pref.kto_reference_point(policy, policy + 1, mask) == 0


def test_orpo_is_finite_for_near_certain_answers():
    mean = np.array([-1e-12, 0.0, -50.0], np.float32)
    loss, gradient = jax.jit(jax.value_and_grad(lambda c: pref.orpo(c, mean[::-1], mean <= 0).sum()))(mean)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


def test_wrong_options_are_refused():
    pair = pref.Pair(*map(jnp.asarray, PAIRS))
    for f, value in ((pref.dpo, 0.5), (pref.dpo, -0.1), (pref.robust_dpo, 0.5), (pref.exo, 0.0)):
        with pytest.raises(ValueError, match=f"label_smoothing={value}"):
            f(pair, jnp.asarray(MASK), label_smoothing=value)
    with pytest.raises(ValueError, match="both chosen_length_N and rejected_length_N"):
        pref.ipo(pair, jnp.asarray(MASK), chosen_length_N=LENGTHS[0])
