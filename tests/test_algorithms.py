"""Every critic-free method by its name: its loss against float64 numpy, its options, and whole runs of some.

The numpy side is written from the papers' formulas and shares nothing with the library. N samples in groups of G.
"""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import recipes
from jaxrl_post.config_algorithms import PolicyAlgorithm
from jaxrl_post.loops.credit import Credit, Signals, estimator
from jaxrl_post.loops.groups import Group, Samples
from jaxrl_post.loops.online import run
from jaxrl_post.loops.packed import by_number
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.observe.progress import Phases
from jaxrl_post.rewards.reward import Scores
from jaxrl_post.rollout.sampler import Rollout
from jaxrl_post.training.logprobs import target_stats
from jaxrl_post.training.loss import policy_loss, summarize
from jaxrl_post.training.packing import PackShape, pack
from jaxrl_post.training.surrogate import sampler_metrics, weighed_advantage
from jaxrl_post.types import Completion, Prompt, StopReason, Trajectory

TINY = Path(__file__).parent.parent / "configs" / "tiny"
# The numbers of one step: 3 groups of 4, the last without signal; responses of up to 16 tokens.
LENGTHS = [3, 16, 14, 5, 1, 7, 2, 4, 6, 6, 3, 2]
REWARDS = np.array([1.0, 0.0, 0.5, 0.25, 0.0, 2.0, 1.0, 1.5, 0.5, 0.5, 0.5, 0.5])
GROUPS = np.repeat(np.arange(3), 4)
GREEDY = np.array([0.75, 1.0, 0.25])  # of each group's prompt
# The rewards are the sum of two heads with weights; the second is missing for sample 6, and none tells group 2 apart.
WEIGHTS = (1.0, 0.5)
SECOND = np.array([3.0, 1.0, 1.0, 2.0, 0.0, 0.0, np.nan, 1.0, 7.0, 7.0, 7.0, 7.0])
HEADS = np.stack([REWARDS - 0.5 * np.nan_to_num(SECOND), SECOND], axis=1)
LIMIT, ENTROPY, N = 16, 1.5, len(LENGTHS)
SHAPE = PackShape(rows=3, length=64, targets=64, micro_batches=1)
rng = np.random.default_rng(7)
OLD = [rng.normal(-2.0, 0.5, n).astype(np.float32) for n in LENGTHS]
NEW = [old + rng.normal(0.0, 0.4, len(old)).astype(np.float32) for old in OLD]
REF = [old + rng.normal(0.0, 0.3, len(old)).astype(np.float32) for old in OLD]
SAMPLER = [old + rng.normal(0.0, 0.3, len(old)).astype(np.float32) for old in OLD]


def load(kind, *overrides):
    return recipes.load(TINY / f"{kind}.yaml", [f"rollout.max_new_tokens={LIMIT}", *overrides])


# ------------------------------------------------------------------------------------------- the library's side


def credit_of(config, old=None, reference=None):
    """A Credit with a stand-in for the model: greedy answers with rewards GREEDY, log-probs as given."""
    one = np.zeros(1, np.float32)
    greedy = Rollout([Completion(p, np.zeros(1, np.int32), one, one, StopReason.STOP) for p in range(3)], (1,), (1,))
    job = SimpleNamespace(
        config=config,
        prompt_width=8,
        tokenizer=SimpleNamespace(decode=lambda ids: ""),
        reward=GreedyReward(),
    )
    sampler = SimpleNamespace(generate=lambda params, ids, options, **_: greedy)
    learner = SimpleNamespace(
        old_logprobs=lambda state, trajectories, phases: old,
        reference_logprobs=lambda trajectories, phases: reference,
    )
    return Credit(job, sampler, learner)


class GreedyReward:
    """Two heads with weights; GREEDY is their sum."""

    weights = WEIGHTS

    def __call__(self, responses):
        greedy = np.array([GREEDY[response.prompt.row["group"]] for response in responses])
        return Scores(greedy, np.stack([greedy, 0 * greedy], axis=1))


def samples(has_signal=(True, True, True)):
    prompts = [Prompt((1, 2, 3 + g), "", {"group": g}) for g in range(3)]
    completions = [
        Completion(int(g), np.arange(n, dtype=np.int32), old, old, StopReason.LENGTH if n == LIMIT else StopReason.STOP)
        for g, n, old in zip(GROUPS, LENGTHS, OLD, strict=True)
    ]
    return Samples(prompts, Rollout(completions, (1,), (1,)), [""] * N, Scores(REWARDS, HEADS), np.array(has_signal))


def packed(trajectories, algorithm, values):
    """The batch of one update, and `values` (a list of arrays, one a trajectory) at its targets."""
    options = {"aggregation": algorithm.aggregation, "scale_length": LIMIT, "keep_all": True}
    batch, n_micro, _ = pack(trajectories, SHAPE, **options)
    assert n_micro == 1
    moved = [dataclasses.replace(t, logp=value) for t, value in zip(trajectories, values, strict=True)]
    at_targets, _, _ = pack(moved, SHAPE, **options)
    return jax.tree.map(lambda x: x[0], batch), jnp.asarray(at_targets.old_logp[0])


def library_loss(config, **score):
    """The loss of one update with the current policy at NEW, and its metrics; both sides go through packed rows."""
    algorithm = config.algorithm
    trajectories, _ = credit_of(config, **score).assign(samples(), None, None, Phases())
    batch, new_BM = packed(trajectories, algorithm, NEW)
    _, ref_BM = packed(trajectories, algorithm, REF)
    batch = batch._replace(ref_logp=ref_BM)
    value, tally = policy_loss(algorithm, num_sequences=N)(new_BM, jnp.full(new_BM.shape, ENTROPY), batch)
    return float(value), summarize(tally)


# --------------------------------------------------------------------------------------------- the formulas' side


def members(group):
    return slice(4 * group, 4 * group + 4)


def per_group(f, rewards=REWARDS):
    return np.concatenate([f(rewards[members(g)]) for g in range(3)])


def leave_one_out(r):
    return np.array([r[i] - np.delete(r, i).mean() for i in range(4)])


def centred(rewards=REWARDS):
    return np.concatenate([rewards[members(g)] - rewards[members(g)].mean() for g in range(3)])


def grpo_advantage(rewards=REWARDS):
    std = np.concatenate([np.full(4, rewards[members(g)].std(ddof=1)) for g in range(3)])
    return centred(rewards) / (std + 1e-6)


def whitened_tokens(rows):
    flat = np.concatenate(rows)
    return [(row - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8) for row in rows]


def opo():
    lengths = np.array(LENGTHS, float)
    base = [(lengths * REWARDS)[members(g)].sum() / lengths[members(g)].sum() for g in range(3)]
    return REWARDS - np.array(base)[GROUPS]


def best_over_second(r):
    first, second = np.sort(r)[::-1][:2]
    return np.where(np.arange(4) == r.argmax(), first - second, 0.0)


def overlong(buffer, factor):
    return np.array([min(-(n - (LIMIT - buffer)) / buffer * factor, 0.0) for n in LENGTHS])


def gdpo():
    """Each head by its own group's present mean and standard deviation, weighed, over the batch's deviation."""
    total = np.zeros(N)
    for head, weight in zip(HEADS.T, WEIGHTS, strict=True):
        for g in range(3):
            r = head[members(g)]
            scaled = (r - np.nanmean(r)) / (np.nanstd(r, ddof=1) + 1e-6)
            total[members(g)] += weight * np.nan_to_num(scaled)
    return (total - total.mean()) / (total.std(ddof=1) + 1e-6)


ADVANTAGES = {
    "gdpo": gdpo,
    "grpo": grpo_advantage,
    "dr_grpo": centred,
    "rloo": lambda: per_group(leave_one_out),
    "opo": opo,
    "pass_at_k": lambda: per_group(best_over_second),
    "maxrl": lambda: per_group(lambda r: (r - r.mean()) / r.mean()),
    "lite_ppo": lambda: centred() / (REWARDS.std(ddof=1) + 1e-6),
    "gpg": lambda: centred() * 12 / 8,
    "remax": lambda: REWARDS - GREEDY[GROUPS],
    "dapo": lambda: grpo_advantage(REWARDS + overlong(4, 0.1)),
}


def token_advantages(kind):
    """One array a sample."""
    if kind == "reinforce_plus_plus_baseline":
        return whitened_tokens([np.full(n, a) for n, a in zip(LENGTHS, centred(), strict=True)])
    if kind == "reinforce_plus_plus":
        returns = []
        for old, ref, reward in zip(OLD, REF, REWARDS, strict=True):
            kl = 0.01 * (old.astype(float) - ref)
            returns.append(reward - np.cumsum(kl[::-1])[::-1])
        return whitened_tokens(returns)
    name = {"policy_gradient": "rloo"}.get(kind, kind if kind in ADVANTAGES else "grpo")
    return [np.full(n, a) for n, a in zip(LENGTHS, ADVANTAGES[name](), strict=True)]


def ppo(a, new, old, low=0.2, high=0.2):
    r = np.exp(new - old)
    return np.maximum(-a * r, -a * np.clip(r, 1 - low, 1 + high))


def gspo(a, new, old):
    s = np.exp((new - old).mean())
    return np.maximum(-a * s, -a * np.clip(s, 1 - 3e-4, 1 + 4e-4))


def cispo(a, new, old):
    return -np.clip(np.exp(new - old), 0.0, 5.0) * a * new


def sapo(a, new, old):
    tau = np.where(a > 0, 1.0, 1.05)
    return -a * 4 / tau / (1 + np.exp(-tau * (np.exp(new - old) - 1)))


def dppo(a, new, old):
    moved = np.exp(new) - np.exp(old)
    keep = ~(((a > 0) & (moved > 0.2)) | ((a < 0) & (moved < -0.2)))
    return -a * np.minimum(np.exp(new - old), 20) * new * keep


def gmpo(a, new, old):
    delta = new - old
    bounded = np.where(a > 0, np.minimum(delta, 0.4), np.where(a < 0, np.maximum(delta, -0.4), delta))
    return -a * np.exp(bounded.mean())


def topr(a, new, old):
    return -a * np.where(a < 0, min(np.exp((new - old).sum()), 1.0), 1.0) * new


def dro(a, new, old):
    return -(a * new - 0.05 / 2 * (new - old) ** 2)


def dapo(a, new, old):
    return ppo(a, new, old, 0.2, 0.28)


SURROGATES = {"gspo": gspo, "cispo": cispo, "sapo": sapo, "dppo": dppo, "gmpo": gmpo, "topr": topr, "custom": dro}
SURROGATES |= {"dapo": dapo} | dict.fromkeys(("gpg", "policy_gradient"), lambda a, new, old: -a * new)
REDUCTIONS = {"dr_grpo": "constant", "gspo": "mean", "sapo": "mean", "gmpo": "mean", "topr": "sum"}


def reduced(terms, how):
    if how == "token":
        return np.concatenate(terms).mean()
    per_sample = {"mean": np.mean, "sum": np.sum, "constant": lambda t: t.sum() / LIMIT}[how]
    return np.mean([per_sample(t) for t in terms])


def expected_terms(kind, advantages=None):
    surrogate = SURROGATES.get(kind, ppo)
    triples = zip(advantages or token_advantages(kind), NEW, OLD, strict=True)
    return [surrogate(a, new.astype(float), old.astype(float)) for a, new, old in triples]


KINDS = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo"]
KINDS += ["pass_at_k", "gdpo", "maxrl", "lite_ppo", "gpg", "dapo", *(k for k in SURROGATES if k not in ("gpg", "dapo"))]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_method_is_its_papers(kind):
    config = load(kind)
    assert config.algorithm.kind == kind
    value, metrics = library_loss(config, old=OLD, reference=REF)
    expected = reduced(expected_terms(kind), REDUCTIONS.get(kind, "token"))
    np.testing.assert_allclose(metrics["actor/pg_loss"], expected, rtol=3e-5, atol=1e-6)
    bonus = 1e-3 * ENTROPY if kind == "policy_gradient" else 0.0
    np.testing.assert_allclose(value, expected - bonus, rtol=3e-5, atol=1e-6)


def binary_kl(a, new, old):
    p, q, delta = np.exp(new), np.exp(old), new - old
    far = q * (old - new) + (1 - q) * np.log((1 - q) / (1 - p)) > 0.02
    return -a * np.exp(delta) * new * ~(far & (a * delta > 0))


def sequence_gspo(a, new, old):
    s = np.exp((new - old).mean())
    return np.maximum(-a * s, -a * np.clip(s, 0.9, 1.1))


def token_topr(a, new, old):
    return -a * np.where(a < 0, np.minimum(np.exp(new - old), 1.0), 1.0) * new


@pytest.mark.parametrize(
    ("kind", "override", "surrogate"),
    [
        ("dppo", "algorithm.region={kind: kl, limit: 0.02}", binary_kl),
        ("gspo", "algorithm={kind: gspo, level: sequence, clip_low: 0.1, clip_high: 0.1}", sequence_gspo),
        ("topr", "algorithm.level=token", token_topr),
    ],
)
def test_variants_of_a_method(kind, override, surrogate):
    rows = zip(token_advantages(kind), NEW, OLD, strict=True)
    terms = [surrogate(a, new.astype(float), old.astype(float)) for a, new, old in rows]
    expected = reduced(terms, REDUCTIONS.get(kind, "token"))
    np.testing.assert_allclose(library_loss(load(kind, override))[0], expected, rtol=3e-5)


PARTS = "{a: {reward: {kind: last_number}}, b: {weight: 0.5, reward: {kind: exact_match}}}"


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opo", "pass_at_k", "maxrl", "gpg", "lite_ppo", "gdpo"])
def test_a_surrogate_takes_any_estimator(name):
    reward = f"reward={{kind: weighted, parts: {PARTS}}}"
    trajectories, _ = credit_of(load("cispo", f"algorithm.advantage={name}", reward)).assign(
        samples(), None, None, Phases()
    )
    np.testing.assert_allclose([t.advantage for t in trajectories], ADVANTAGES[name](), rtol=1e-5, atol=1e-6)


def test_every_kind_has_a_recipe_and_a_formula():
    kinds = {member.model_fields["kind"].annotation.__args__[0] for member in PolicyAlgorithm.__args__}
    assert kinds == set(KINDS)


# ---------------------------------------------------------------------------------------------- shared options


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k3+"])
def test_a_kl_in_the_loss_joins_by_the_same_reduction(estimator):
    config = load("grpo", "algorithm.kl.coef=0.3", f"algorithm.kl.estimator={estimator}")
    delta = [new.astype(float) - ref for new, ref in zip(NEW, REF, strict=True)]
    formula = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) + d - 1, "abs": np.abs}
    kl = reduced([formula[estimator.rstrip("+")](d) for d in delta], "token")
    expected = reduced(expected_terms("grpo"), "token") + 0.3 * kl
    np.testing.assert_allclose(library_loss(config)[0], expected, rtol=3e-5)


def test_an_importance_corrected_kl_is_weighed_by_the_ratio():
    config = load("grpo", "algorithm.kl={coef: 0.3, estimator: k1, importance_corrected: true}")
    rows = zip(NEW, OLD, REF, strict=True)
    kl = reduced([np.exp(new.astype(float) - old) * (new - ref.astype(float)) for new, old, ref in rows], "token")
    np.testing.assert_allclose(library_loss(config)[1]["actor/kl_loss"], kl, rtol=3e-5)


def test_a_kl_in_the_reward_lowers_the_return_of_the_whole_response():
    config = load("rloo", "algorithm.kl={coef: 0.2, estimator: k1, where: reward}")
    trajectories, metrics = credit_of(config, OLD, REF).assign(samples(), None, None, Phases())
    kl = [old.astype(float) - ref for old, ref in zip(OLD, REF, strict=True)]
    returns = REWARDS - 0.2 * np.array([row.sum() for row in kl])
    expected = per_group(leave_one_out, returns)
    np.testing.assert_allclose([t.advantage for t in trajectories], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["actor/reward_kl_penalty"], np.mean([row.mean() for row in kl]), rtol=1e-5)
    np.testing.assert_allclose(metrics["critic/rewards/mean"], returns.mean(), rtol=1e-5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.2


def test_the_adaptive_coefficient_follows_the_kl_and_survives_a_restart():
    config = load("rloo", "algorithm.kl={coef: 0.2, estimator: k3, where: reward, target: 0.01, horizon: 60}")
    credit = credit_of(config, OLD, REF)
    used = [credit.assign(samples(), None, None, Phases())[1]["actor/reward_kl_penalty_coeff"] for _ in range(2)]
    np.testing.assert_allclose(used, [0.2, 0.2 * (1 + 0.2 * N / 60)], rtol=1e-6)
    restarted = credit_of(config, OLD, REF)
    restarted.restore(json.loads(json.dumps(credit.state())))
    np.testing.assert_allclose(restarted.state()["kl_coef"], 0.2 * (1 + 0.2 * N / 60) ** 2, rtol=1e-6)
    fixed = credit_of(load("rloo"))
    fixed.restore(credit.state())
    assert fixed.state()["kl_coef"] == 0


def test_discounting_counts_tokens_to_go():
    config = load("reinforce_plus_plus", "algorithm.kl.coef=0", "algorithm.gamma=0.5")
    trajectories, _ = credit_of(config).assign(samples(), None, None, Phases())
    returns = [reward * 0.5 ** np.arange(n)[::-1] for reward, n in zip(REWARDS, LENGTHS, strict=True)]
    for t, expected in zip(trajectories, whitened_tokens(returns), strict=True):
        np.testing.assert_allclose(t.advantage, expected, rtol=1e-4, atol=1e-5)


def test_groups_that_only_fill_a_step_touch_no_statistic():
    config = load("lite_ppo")
    trajectories, _ = credit_of(config).assign(samples((True, True, False)), None, None, Phases())
    expected = centred()[:8] / (REWARDS[:8].std(ddof=1) + 1e-6)
    np.testing.assert_allclose([t.advantage for t in trajectories], [*expected, 0, 0, 0, 0], rtol=1e-5, atol=1e-6)
    assert [t.train for t in trajectories] == [True] * 8 + [False] * 4


def test_overlong_answers_are_punished_and_can_be_masked():
    config = load("dapo", "algorithm.drop_truncated=true", "algorithm.overlong={factor: 2.0}")
    trajectories, metrics = credit_of(config).assign(samples(), None, None, Phases())
    assert [t.train for t in trajectories] == [n != LIMIT for n in LENGTHS]
    shaped = REWARDS + overlong(LIMIT // 5, 2.0)
    np.testing.assert_allclose([t.advantage for t in trajectories], grpo_advantage(shaped), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["critic/rewards/min"], shaped.min(), rtol=1e-6)


def dual(a, new, old):
    return np.where(a < 0, np.minimum(ppo(a, new, old), -a * 1.3), ppo(a, new, old))


def test_dual_clip_bounds_the_loss_of_bad_samples():
    rows = zip(token_advantages("grpo"), NEW, OLD, strict=True)
    expected = reduced([dual(a, new.astype(float), old.astype(float)) for a, new, old in rows], "token")
    value, metrics = library_loss(load("grpo", "algorithm.dual_clip=1.3"))
    np.testing.assert_allclose(value, expected, rtol=3e-5)
    assert metrics["actor/pg_clipfrac_lower"] > 0


def weights(correction):
    """One array a sample, from log π_old − log π_sampler."""
    gaps = [old.astype(float) - sampler for old, sampler in zip(OLD, SAMPLER, strict=True)]
    return [np.broadcast_to(CORRECTIONS[correction](gap), gap.shape) for gap in gaps]


def in_band(low, high, value):
    return float(low <= value <= high)


CORRECTIONS = {
    "{kind: token_tis, high: 1.1}": lambda d: np.clip(np.exp(d), 0, 1.1),
    "{kind: sequence_tis, high: 1.5}": lambda d: min(np.exp(d.sum()), 1.5),
    "{kind: icepop, low: 0.8, high: 1.2}": lambda d: np.exp(d) * ((np.exp(d) >= 0.8) & (np.exp(d) <= 1.2)),
    "{kind: geometric, low: 0.9, high: 1.1}": lambda d: in_band(0.9, 1.1, np.exp(d.mean())),
    "{kind: sequence_mask_tis, low: 0.9, high: 1.1}": lambda d: np.exp(d) * in_band(0.9, 1.1, np.exp(d.mean())),
    "{kind: kl_rejection, estimator: k1, upper: 0.2}": lambda d: np.abs(d) <= 0.2,
    "{kind: kl_rejection, estimator: k3, level: seq_max, upper: 0.1}": lambda d: float((np.expm1(d) - d).max() <= 0.1),
}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_weighs_by_trainer_over_sampler_and_leaves_the_denominator(correction):
    config = load("grpo", "algorithm.old_logprobs=trainer", f"algorithm.correction={correction}")
    trajectories, _ = credit_of(config).assign(samples(), None, None, Phases())
    batch, new_BM = packed(trajectories, config.algorithm, NEW)
    _, sampler_BM = packed(trajectories, config.algorithm, SAMPLER)
    batch = batch._replace(rollout_logp=sampler_BM)
    value, tally = policy_loss(config.algorithm, num_sequences=N)(new_BM, jnp.zeros(new_BM.shape), batch)
    terms = [term * w for term, w in zip(expected_terms("grpo"), weights(correction), strict=True)]
    np.testing.assert_allclose(value, reduced(terms, "token"), rtol=3e-5)
    dropped = summarize(tally)["rollout_corr/rollout_rs_masked_fraction"]
    np.testing.assert_allclose(dropped, np.mean(np.concatenate(weights(correction)) == 0), rtol=1e-5, atol=1e-7)


def test_three_policies_by_hand():
    """w_behaviour · max(−A·u, −A·clip(u)): u = π_θ/π_old in the clip, w = π_old/π_sampler truncated at 2 before it."""
    config = recipes.load(TINY / "decoupled_ppo.yaml")
    p = {"sampler": [[0.5, 0.1], [0.4, 0.5]], "old": [[0.4, 0.3], [0.2, 0.5]], "new": [[0.5, 0.15], [0.3, 0.2]]}
    logp = {name: [np.log(np.array(row, np.float32)) for row in rows] for name, rows in p.items()}
    ids = np.array([5, 6], np.int32)
    trajectories = [Trajectory(0, (1, 2), ids, old, a) for old, a in zip(logp["old"], (1.0, -1.0), strict=True)]
    batch, new_BM = packed(trajectories, config.algorithm, logp["new"])
    _, sampler_BM = packed(trajectories, config.algorithm, logp["sampler"])
    batch = batch._replace(rollout_logp=sampler_BM)
    loss = policy_loss(config.algorithm, num_sequences=2)
    # A=1: w 0.8, u 1.25 clipped to 1.2; w 3 cut to 2, u 0.5. A=-1: w 0.5, u 1.5 unclipped; w 1, u 0.4 clipped to 0.8.
    expected = (0.8 * -1.2 + 2 * -0.5 + 0.5 * 1.5 + 1 * 0.8) / 4
    for transform in (lambda f: f, jax.jit):
        value, _ = transform(loss)(new_BM, jnp.zeros(new_BM.shape), batch)
        np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("correction", ["{kind: token_tis, high: 1.1", "{kind: sequence_tis, high: 1.5"])
@pytest.mark.parametrize("split", [1, 3])
def test_batch_normalised_weights_average_one_however_the_update_is_split(correction, split):
    """Rows of the update as one micro-batch of three, or as three of one."""
    config = load(
        "grpo", "algorithm.old_logprobs=trainer", f"algorithm.correction={correction}, batch_normalize: true}}"
    )
    trajectories, _ = credit_of(config).assign(samples(), None, None, Phases())
    assert config.algorithm.keeps_zero_advantage
    batch, new_BM = packed(trajectories, config.algorithm, NEW)
    _, sampler_BM = packed(trajectories, config.algorithm, SAMPLER)
    batch = batch._replace(rollout_logp=sampler_BM)
    cut = lambda x: jnp.asarray(x).reshape(split, 3 // split, *x.shape[1:])
    whole = jax.tree.map(cut, batch)
    advantage = weighed_advantage(config.algorithm, N)(whole)
    loss = policy_loss(config.algorithm, num_sequences=N)
    zeros = jnp.zeros(new_BM.shape)
    parts = [
        loss(cut(new_BM)[i], cut(zeros)[i], jax.tree.map(lambda x, i=i: x[i], whole._replace(advantage=advantage)))[0]
        for i in range(split)
    ]
    w = weights(f"{correction}}}")
    mean = np.mean([x[0] for x in w]) if "sequence" in correction else np.concatenate(w).mean()
    terms = [term * x / mean for term, x in zip(expected_terms("grpo"), w, strict=True)]
    np.testing.assert_allclose(sum(parts), reduced(terms, "token"), rtol=3e-5)
    measured = sampler_metrics(config.algorithm, N)(whole)
    np.testing.assert_allclose(measured["rollout_corr/rollout_is_batch_norm_factor"], mean, rtol=1e-5)


def test_without_a_trainers_forward_pass_the_policy_of_the_update_is_weighed():
    config = load("policy_gradient", "algorithm.entropy_coef=0", "algorithm.correction={kind: token_tis, high: 1.2}")
    advantages = token_advantages("policy_gradient")
    rows = zip(advantages, NEW, OLD, strict=True)
    expected = reduced([-a * new * np.clip(np.exp(new.astype(float) - old), 0, 1.2) for a, new, old in rows], "token")
    np.testing.assert_allclose(library_loss(config)[0], expected, rtol=3e-5)


def test_metrics_of_the_gap_are_those_of_the_whole_update():
    config = load("grpo", "algorithm.old_logprobs=trainer", "algorithm.correction={kind: token_tis, high: 1.1}")
    trajectories, _ = credit_of(config).assign(samples(), None, None, Phases())
    batch, _ = packed(trajectories, config.algorithm, NEW)
    _, sampler_BM = packed(trajectories, config.algorithm, SAMPLER)
    stacked = jax.tree.map(lambda x: jnp.asarray(x)[None], batch._replace(rollout_logp=sampler_BM))
    metrics = sampler_metrics(config.algorithm, num_sequences=N)(stacked)
    gap = np.concatenate(OLD).astype(float) - np.concatenate(SAMPLER)
    log_ppl = [ro.mean(dtype=float) - old.mean(dtype=float) for old, ro in zip(OLD, SAMPLER, strict=True)]
    np.testing.assert_allclose(metrics["rollout_corr/kl"], -gap.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["rollout_corr/log_ppl_diff_min"], min(log_ppl), rtol=1e-4)
    np.testing.assert_allclose(metrics["rollout_corr/rollout_is_mean"], np.clip(np.exp(gap), 0, 1.1).mean(), rtol=1e-4)


def test_the_off_policy_mask_drops_bad_sequences_that_drifted():
    delta = 0.02
    rows = zip(expected_terms("grpo"), token_advantages("grpo"), NEW, OLD, strict=True)
    kept = [term * ~((a[0] < 0) & ((old - new.astype(float)).mean() > delta)) for term, a, new, old in rows]
    assert sum(not term.any() for term in kept) > 4  # one group has no term anyhow
    value, _ = library_loss(load("grpo", f"algorithm.off_policy_mask={delta}"))
    np.testing.assert_allclose(value, reduced(kept, "token"), rtol=3e-5)


def test_the_entropy_has_a_gradient_when_asked_and_none_otherwise():
    logits = jnp.array([[[0.3, -1.0, 2.0, -jnp.inf]]])
    target = jnp.zeros((1, 1), jnp.int32)
    entropy = lambda on: lambda z: target_stats(z, target, 0.7, on)[1].sum()
    p = np.exp(np.array([0.3, -1.0, 2.0]) / 0.7)
    p /= p.sum()
    expected = -p * (np.log(p) - (p * np.log(p)).sum()) / 0.7
    np.testing.assert_allclose(jax.grad(entropy(True))(logits)[0, 0], [*expected, 0.0], rtol=1e-5)
    np.testing.assert_array_equal(jax.grad(entropy(False))(logits), np.zeros((1, 1, 4)))


def test_values_find_their_trajectory_again():
    trajectories, _ = credit_of(load("grpo")).assign(samples(), None, None, Phases())
    numbered = [dataclasses.replace(t, advantage=float(i + 1)) for i, t in enumerate(trajectories)]
    batch, _, _ = pack(numbered, SHAPE, aggregation="token-mean", keep_all=True)
    for found, old in zip(by_number(batch.old_logp, batch.advantage, N), OLD, strict=True):
        np.testing.assert_array_equal(found, old)


# --------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kind", "override", "parts"),
    [
        ("grpo", "algorithm.correction={kind: token_tis}", ["token_tis", "algorithm.old_logprobs=trainer"]),
        ("grpo", "algorithm.kl={coef: 0.1, target: 0.1}", ["algorithm.kl.target=0.1", "algorithm.kl.where=reward"]),
        ("grpo", "algorithm.kl={coef: 0.1, estimator: k1+, where: reward}", ["estimator=k1+", "algorithm.kl.where"]),
        ("grpo", "algorithm.dual_clip=1", ["algorithm.dual_clip", "greater than 1"]),
        ("gspo", "algorithm.normalize_by_std=true", ["belongs to kind grpo"]),
        ("gspo", "algorithm.advantage=remax", ["algorithm.advantage", "lite_ppo"]),
        ("dapo", "algorithm.overlong={buffer: 99}", ["algorithm.overlong.buffer=99", "rollout.max_new_tokens=16"]),
        ("dppo", "algorithm.region={kind: tv, limit: 1}", ["algorithm.region", "belongs to kind kl"]),
    ],
)
def test_options_that_cannot_act_are_refused(kind, override, parts):
    with pytest.raises(ValueError, match="algorithm") as refused:
        load(kind, override)
    assert not [part for part in parts if part not in str(refused.value)], refused.value


@pytest.mark.parametrize(
    ("function", "options", "part"),
    [
        ("no_such_module:f", "{}", "importing module 'no_such_module' failed"),
        ("jaxrl_post.objectives.surrogates:drop", "{}", "has no function 'drop'; its functions are: "),
        ("jaxrl_post.objectives.surrogates:dro", "{betta: 1.0}", "unexpected keyword argument 'betta'"),
    ],
)
def test_a_custom_loss_that_cannot_be_had_says_why(function, options, part):
    config = load("custom", f"algorithm.function={function}", f"algorithm.options={options}")
    with pytest.raises(ValueError, match=r"algorithm\.function") as refused:
        policy_loss(config.algorithm, num_sequences=1)
    assert part in str(refused.value)


# --------------------------------------------------------------------------------------------- whole runs

QUICK = ["evaluation.enabled=false", "mesh.fsdp=1", "mesh.allow_unused_devices=true"]


def train(kind, run_dir, *overrides):
    run(recipes.load(TINY / f"{kind}.yaml", [f"run_dir={run_dir}", *QUICK, *overrides]))
    return read_metrics(run_dir / "metrics.jsonl")


def dumped(run_dir, step):
    return [json.loads(line) for line in (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def steady(record):
    return {k: v for k, v in record.items() if not k.startswith(("timing_s/", "perf/", "compile/"))}


@pytest.fixture(autouse=True, scope="module")
def _user_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "tests_user.py").write_text(
        "from jaxrl_post.rewards.text import digit_fraction\n"
        "def even_answers(prompts, completions, rows):\n"
        "    found = digit_fraction(prompts, completions, rows)\n"
        "    return [x if int(row['answer']) % 2 == 0 else 0.0 for x, row in zip(found, rows)]\n"
        "def reinforce(logp, old_logp, advantage, mask, scale):\n"
        "    return -scale * advantage * logp\n"
    )
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.mark.slow
def test_dapo_refills_its_steps_and_resumes_with_the_groups_it_carried(tmp_path):
    reward = "reward.function=tests_user:even_answers"
    straight = train("dapo", tmp_path / "straight", "steps=2", reward)
    first = straight[0]
    assert first["training/filter_groups/evicted_samples"] > 0
    assert first["training/filter_groups/carried_samples"] > 0
    assert first["training/filter_groups/missing_samples"] == 0
    groups = np.array([s["reward"] for s in dumped(tmp_path / "straight", 1)]).reshape(4, 8)
    assert (groups.min(axis=1) < groups.max(axis=1)).all()
    train("dapo", tmp_path / "stopped", "steps=1", reward)
    resumed = train("dapo", tmp_path / "stopped", "steps=2", reward)
    assert [steady(r) for r in resumed] == [steady(r) for r in straight]
    assert dumped(tmp_path / "stopped", 2) == dumped(tmp_path / "straight", 2)


@pytest.mark.slow
def test_remax_compares_with_one_greedy_answer_a_prompt(tmp_path):
    records = train("remax", tmp_path, "steps=2")
    for step in (1, 2):
        baseline = np.array([s["reward"] - s["advantage"] for s in dumped(tmp_path, step)]).reshape(4, 8)
        np.testing.assert_allclose(baseline, np.broadcast_to(baseline[:, :1], baseline.shape), atol=1e-6)
        assert baseline.min() > -1e-6
    assert records[1]["actor/grad_norm"] > 0


@pytest.mark.slow
def test_reinforce_plus_plus_keeps_its_adapted_kl_over_a_restart(tmp_path):
    kl = "algorithm.kl={coef: 0.5, target: 0.01, horizon: 100}"
    first = train("reinforce_plus_plus", tmp_path, "steps=1", kl)[0]
    assert first["actor/reward_kl_penalty_coeff"] == 0.5
    assert abs(first["actor/reward_kl_penalty"]) < 1e-5  # the sampler's policy is the reference still
    assert first["critic/advantages/mean"] != 0  # a mean over samples; whitening is over tokens
    second = train("reinforce_plus_plus", tmp_path, "steps=2", kl)[1]
    np.testing.assert_allclose(second["actor/reward_kl_penalty_coeff"], 0.5 * (1 - 0.2 * 32 / 100), rtol=1e-6)
    assert abs(second["actor/reward_kl_penalty"]) > 1e-4


@pytest.mark.slow
def test_gspo_runs_on_packed_sequences(tmp_path):
    corrected = "algorithm.correction={kind: sequence_tis}"
    records = train("gspo", tmp_path, "steps=2", "algorithm.old_logprobs=trainer", corrected)
    assert all(np.isfinite(r["actor/pg_loss"]) and r["actor/grad_norm"] > 0 for r in records)
    assert records[0]["actor/pg_clipfrac"] > 0  # the second mini-batch is off policy beyond 4e-4
    assert abs(records[0]["rollout_corr/log_ppl_diff"]) < 1e-5
    np.testing.assert_allclose(records[0]["rollout_corr/rollout_is_mean"], 1.0, atol=1e-4)


@pytest.mark.slow
def test_a_users_loss_is_the_loss(tmp_path):
    custom = ["algorithm.function=tests_user:reinforce", "algorithm.options={scale: 2.0}"]
    record = train("custom", tmp_path, "steps=1", *custom)[0]
    samples = dumped(tmp_path, 1)
    total = sum(-2.0 * s["advantage"] * np.sum(s["logp"]) for s in samples)
    np.testing.assert_allclose(record["actor/pg_loss"], total / sum(len(s["ids"]) for s in samples), rtol=1e-4)


# ------------------------------------------------------------------------------------ what cannot teach anything

GROUPED = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "pass_at_k", "maxrl", "lite_ppo", "gpg"]
GROUPED += ["gdpo", "dapo", "gspo", "cispo", "sapo", "dppo", "gmpo", "topr", "policy_gradient"]


@pytest.mark.parametrize("kind", GROUPED)
def test_one_sample_a_prompt_teaches_a_method_that_compares_samples_nothing(kind):
    alone = np.arange(3)
    signals = Signals(
        REWARDS[:3].astype(np.float32), alone, np.array(LENGTHS[:3]), heads_NK=HEADS[:3].astype(np.float32),
        weights_K=np.array(WEIGHTS, np.float32),
    )  # fmt: skip
    np.testing.assert_array_equal(estimator(load(kind).algorithm, LIMIT)(signals), 0)
    with pytest.raises(recipes.RecipeError, match=r"rollout\.samples_per_prompt=1 leaves algorithm\.\w+=\w+ nothing"):
        load(kind, "rollout.samples_per_prompt=1")


@pytest.mark.parametrize("kind", ["remax", "reinforce_plus_plus", "ppo", "custom"])
def test_methods_with_another_baseline_take_one_sample_a_prompt(kind):
    assert load(kind, "rollout.samples_per_prompt=1").rollout.samples_per_prompt == 1


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("grpo", ["algorithm.clip_low=1.5"], r"algorithm\.clip_low: 1\.5 is not allowed .*less than or equal to 1"),
        ("gspo", ["algorithm.clip_low=1.5"], r"algorithm\.clip_low: 1\.5 is not allowed"),
        ("grpo", ["algorithm.kind=gdpo"], r"reward\.kind=function is one number, and algorithm\.kind=gdpo compares"),
        ("cispo", ["algorithm.advantage=gdpo"], r"algorithm\.advantage=gdpo compares the parts"),
        ("gdpo", ["algorithm.overlong={}"], r"algorithm\.overlong changes the sum .* algorithm\.kind=gdpo"),
        ("gdpo", ["algorithm.kl={coef: 0.1, where: reward, estimator: k1}"], r"algorithm\.kl\.where=reward changes"),
        ("gdpo", ["reward.parts={}"], r"reward\.parts: .*at least 1"),
        ("gdpo", ["reward.parts.a b={}"], "write section.key=value"),
        ("gdpo", ["reward.parts.digits.weigh=2"], r"reward\.parts\.digits\.weigh: no such key .*Did you mean"),
        ("gdpo", ["reward.parts.more={weight: 1}"], r"reward\.parts\.more\.reward\.kind is required"),
        ("gdpo", ["reward.parts.digits.weight=0", "reward.parts.distinct.weight=0"], "reward.parts all have weight=0"),
        ("gdpo", ["reward.parts.digits.reward={kind: weighted}"], "kind weighted is not one of"),
        ("gdpo", ["reward.parts.digits.reward={kind: reasoning_gym}"], "parts.digits.reward.kind=reasoning_gym"),
        ("gspo", ["algorithm.correction={kind: token_tis, batch_normalize: true}"], "kind=token_tis .* weighs by"),
        (
            "policy_gradient",
            ["algorithm.correction={kind: token_tis, batch_normalize: true}"],
            r"batch_normalize=true needs the weights of the whole update .* set algorithm\.old_logprobs=trainer",
        ),
        (
            "custom",
            ["algorithm.correction={kind: token_tis, batch_normalize: true}", "algorithm.old_logprobs=trainer"],
            "kind custom need not be linear",
        ),
    ],
)  # fmt: skip
def test_options_that_cannot_be_together(kind, overrides, message):
    with pytest.raises(recipes.RecipeError, match=message):
        load(kind, *overrides)


def test_cispo_may_leave_its_lower_side_open():
    assert load("cispo", "algorithm.clip_low=1.5").algorithm.clip_low == 1.5


@pytest.mark.parametrize(
    ("second", "totals", "heads"),
    [([2.0, 2.0], False, False), ([1.0, 2.0], True, True), ([4.0, 3.0], True, True), ([np.nan, 2.0], True, False)],
)
def test_what_counts_as_signal_of_a_group(second, totals, heads):
    """The first head is 1 for both samples. Heads that cancel in the sum still differ, a missing one tells nothing."""
    head = np.array(second)
    group = Group(Prompt((1,), "", {}), [], [], Scores(1 + np.nan_to_num(head), np.stack([[1.0, 1.0], head], axis=1)))
    assert group.has_signal((1.0, 1.0), by_heads=False) is totals
    assert group.has_signal((1.0, 1.0), by_heads=True) is heads
    assert group.has_signal((1.0, 0.0), by_heads=True) is False
    cancelled = Group(group.prompt, [], [], Scores(np.array([3.0, 3.0]), np.array([[1.0, 2.0], [2.0, 1.0]])))
    assert not cancelled.has_signal((1.0, 1.0), by_heads=False)
    assert cancelled.has_signal((1.0, 1.0), by_heads=True)
