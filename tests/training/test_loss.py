"""The loss and its metrics on hand-made micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.config import GRPO
from jaxrl_post.training.loss import combine, policy_loss, summarize
from jaxrl_post.training.packing import PackShape, empty_batch


def micro(**fields):
    """One row of 4 targets, 3 live, weight 1/3."""
    batch = empty_batch(PackShape(rows=1, length=4, targets=4, micro_batches=1))
    base = {name: field[0] for name, field in batch._asdict().items()}
    base["mask"] = np.array([[True, True, True, False]])
    base["weight"] = np.where(base["mask"], 1 / 3, 0).astype(np.float32)
    return batch._replace(**base | {name: np.array([row], np.float32) for name, row in fields.items()})


LOGP = jnp.array([[-1.0, -2.0, -3.0, 7.0]])
ENTROPY = jnp.array([[1.0, 2.0, 6.0, 50.0]])
GARBAGE = np.nan


def test_on_policy_the_loss_is_minus_the_weighted_advantage():
    advantage = [1.0, -2.0, 3.0, GARBAGE]
    batch = micro(advantage=advantage, old_logp=[-1.0, -2.0, -3.0, GARBAGE], rollout_logp=[-1.0, -2.0, -3.0, GARBAGE])
    loss, tally = policy_loss(GRPO(), num_sequences=1)(LOGP, ENTROPY, batch)
    metrics = summarize(tally)
    np.testing.assert_allclose(loss, -2 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/pg_loss"], -2 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/entropy"], 3.0)
    for name in ("actor/ppo_kl", "actor/pg_clipfrac", "rollout_corr/kl", "training/rollout_probs_diff_max"):
        assert metrics[name] == 0, name
    gradient = jax.grad(lambda logp: policy_loss(GRPO(), num_sequences=1)(logp, ENTROPY, batch)[0])(LOGP)
    np.testing.assert_allclose(gradient, [[-1 / 3, 2 / 3, -1.0, 0.0]], rtol=1e-6)


def test_clipping_and_kl_by_hand():
    """Ratios 1.5 (A 1: clipped at 1.2), 0.5 (A −1: clipped at 0.8), 1 (A 2); reference 0.5 below the policy."""
    ratio = np.log(np.array([1.5, 0.5, 1.0]))
    old = np.append(np.array([-1.0, -2.0, -3.0]) - ratio, GARBAGE)
    batch = micro(
        advantage=[1.0, -1.0, 2.0, GARBAGE],
        old_logp=old,
        ref_logp=[-1.5, -2.5, -3.5, GARBAGE],
        rollout_logp=[-1.0, -2.0, -3.0, GARBAGE],
    )
    algorithm = GRPO.model_validate({"kl": {"coef": 0.1, "estimator": "k3"}})
    loss, tally = policy_loss(algorithm, num_sequences=1)(LOGP, ENTROPY, batch)
    metrics = summarize(tally)
    policy, kl = (-1.2 + 0.8 - 2.0) / 3, np.exp(-0.5) - 0.5
    np.testing.assert_allclose(loss, policy + 0.1 * kl, rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/kl_loss"], kl, rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/ppo_kl"], -ratio.sum() / 3, rtol=1e-5)


def test_the_gap_to_the_sampler_is_measured_over_all_micro_batches():
    rollout = [np.array([-1.1, -2.0, -2.7, GARBAGE]), np.array([-1.0, -2.5, -3.0, GARBAGE])]
    zeros = [0.0] * 4
    tallies = [
        policy_loss(GRPO(), num_sequences=1)(LOGP, ENTROPY, micro(advantage=zeros, old_logp=zeros, rollout_logp=r))[1]
        for r in rollout
    ]
    metrics = summarize(combine(*tallies))
    ours = np.tile([-1.0, -2.0, -3.0], 2)
    theirs = np.concatenate([r[:3] for r in rollout])
    difference, gap = np.abs(np.exp(ours) - np.exp(theirs)), ours - theirs
    expected = {
        "training/rollout_probs_diff_mean": difference.mean(),
        "training/rollout_probs_diff_max": difference.max(),
        "training/rollout_probs_diff_std": difference.std(),
        "rollout_corr/kl": -gap.mean(),
        "rollout_corr/k3_kl": (np.exp(gap) - 1 - gap).mean(),
        "rollout_corr/logp_abs_diff_max": 0.5,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-7, err_msg=name)
