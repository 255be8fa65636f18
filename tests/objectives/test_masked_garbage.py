"""Whatever lies under the mask, losses, gradients and statistics keep their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import kl, reductions, sequence_surrogates, surrogates

MASK = np.array([[1, 1, 0, 0], [1, 0, 0, 1]], bool)
LIVE = np.random.default_rng(0).uniform(-2, -0.1, (4, 2, 4)).astype(np.float32)
GARBAGE = [-100.0, -np.inf, np.inf, np.nan, 200.0]


def grpo_with_kl(logp, old, ref, advantage):
    mask = jnp.asarray(MASK)
    out = surrogates.ppo_clip(logp, old, advantage, mask, dual_clip=3.0)
    term = out.term_BT + 0.1 * kl.penalty(logp, ref, mask, "k3")
    term += 0.1 * kl.importance_corrected(logp, old, ref, mask, "k1")
    return reductions.weighted_sum(term, mask, jnp.full((2, 4), 0.25)), out.stats


def test_grpo_with_kl_keeps_its_bits():
    f = jax.jit(jax.value_and_grad(grpo_with_kl, argnums=(0, 1, 2, 3), has_aux=True))
    clean = f(*np.where(MASK, LIVE, 0))
    for garbage in GARBAGE:
        for dirty_argument in range(4):
            inputs = np.where(MASK, LIVE, 0)
            inputs[dirty_argument][~MASK] = garbage
            jax.tree.map(np.testing.assert_array_equal, f(*inputs), clean)
        jax.tree.map(np.testing.assert_array_equal, f(*np.where(MASK, LIVE, garbage)), clean)
    np.testing.assert_array_equal(np.asarray(clean[1][0])[~MASK], 0)
    assert np.abs(clean[1][0]).sum() > 0


@pytest.mark.parametrize(
    "f",
    [
        surrogates.policy_gradient,
        surrogates.cispo,
        surrogates.sapo,
        surrogates.dppo_tv,
        surrogates.dppo_kl,
        surrogates.dro,
        sequence_surrogates.gspo,
        sequence_surrogates.gmpo,
        sequence_surrogates.topr,
    ],
)
def test_every_surrogate_keeps_its_bits_and_vmaps(f):
    mask = jnp.asarray(MASK)

    def loss(logp, old, advantage, mask):
        out = f(logp, old, advantage, mask)
        return reductions.weighted_sum(out.term_BT, mask, jnp.full(mask.shape, 0.25)), out

    g = jax.jit(jax.value_and_grad(loss, has_aux=True))
    clean = g(*np.where(MASK, LIVE[:3], 0), mask)
    for garbage in GARBAGE:
        jax.tree.map(np.testing.assert_array_equal, g(*np.where(MASK, LIVE[:3], garbage), mask), clean)
    assert np.abs(clean[1]).sum() > 0
    np.testing.assert_array_equal(np.asarray(clean[1])[~MASK], 0)
    rows = [jnp.asarray(x)[:, None] for x in np.where(MASK, LIVE[:3], np.nan)]
    (_, out), gradient = jax.jit(jax.vmap(jax.value_and_grad(loss, has_aux=True)))(*rows, mask[:, None])
    np.testing.assert_allclose(out.term_BT[:, 0], clean[0][1].term_BT, rtol=1e-6)
    np.testing.assert_allclose(gradient[:, 0], clean[1], rtol=1e-6)
