"""PPO with a critic: one step against float64 numpy from separate rows, and whole runs.

N samples; T positions of a row, R the response limit, D width.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.loops.critic import Critic
from jaxrl_post.loops.job import build
from jaxrl_post.loops.network import initial_params
from jaxrl_post.loops.online import run
from jaxrl_post.loops.token_credit import Scores, credit_tokens
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.observe.progress import Phases
from jaxrl_post.types import Trajectory

RECIPE = Path(__file__).parent.parent / "configs" / "tiny" / "ppo.yaml"
ONE_DEVICE = ["mesh.fsdp=1", "mesh.allow_unused_devices=true"]
GAMMA, LAM, CLIP, R = 0.9, 0.8, 0.02, 6
SMALL = [
    f"rollout.max_new_tokens={R}", "rollout.samples_per_prompt=3", "data.prompts_per_step=2",
    "algorithm.epochs=1", "algorithm.mini_batches=1", f"algorithm.gamma={GAMMA}", f"algorithm.lam={LAM}",
]  # fmt: skip
# Cut, stopped, one token, stopped at the limit; not trained on; without a reward.
LENGTHS = [6, 3, 1, 6, 4, 2]
TRUNCATED = np.array([True, False, False, False, True, False])
REWARDS = np.array([1.0, -0.5, 2.0, 0.25, 3.0, np.nan], np.float32)
LIVE = [0, 1, 2, 3]
rng = np.random.default_rng(3)
PENALTY = rng.normal(0.0, 0.1, (6, R)).astype(np.float32)


def samples():
    draw = np.random.default_rng(5)
    prompts = [tuple(draw.integers(3, 200, n).tolist()) for n in (7, 4)]
    return [
        Trajectory(i // 3, prompts[i // 3], draw.integers(3, 200, n).astype(np.int32), np.zeros(n, np.float32), 0.0)
        for i, n in enumerate(LENGTHS)
    ]


TRAJECTORIES = [dataclasses.replace(t, train=i != 4) for i, t in enumerate(samples())]


@functools.cache
def job(bootstrap=False):
    critic_options = f"algorithm.critic={{learning_rate: 3e-4, value_clip: {CLIP}}}"
    overrides = [f"algorithm.bootstrap_truncated={str(bootstrap).lower()}", critic_options]
    return build(recipes.load(RECIPE, [*ONE_DEVICE, *SMALL, *overrides]))


@functools.cache
def compiled(bootstrap):
    return Critic(job(bootstrap), job(bootstrap).config.algorithm)


def critic(bootstrap=False, scale=0.3):
    """Fresh weights with a drawn head, so that values differ from 0."""
    made = compiled(bootstrap)
    made.start(initial_params(job().network, job().config.seed))
    arrays = made.arrays()
    weight = arrays["critic"]["params"]["head"]["weight"]
    drawn = scale * np.random.default_rng(0).standard_normal(weight.shape).astype(np.float32)
    arrays["critic"]["params"]["head"]["weight"] = jax.device_put(drawn, weight.sharding)
    made.restore(arrays)
    return made


@functools.cache
def hidden_program():
    def hidden(params, tokens_1T, length):
        at_1T = np.arange(tokens_1T.shape[1], dtype=np.int32)[None]
        inside_1T = (at_1T < length).astype(np.int32)
        return nnx.merge(job().network.graphdef, params).hidden(tokens_1T, at_1T, inside_1T, 0 * inside_1T)

    return jax.jit(hidden)


def reference_values(made, t):
    return values_of(made.arrays()["critic"]["params"], t)


def values_of(params, t):
    """float64 [n + 1], from a row that holds this sample alone: of each token's state, and of the one after."""
    ids = [*t.prompt_ids, *t.response_ids]
    tokens_1T = np.zeros((1, 16), np.int32)
    tokens_1T[0, : len(ids)] = ids
    x_TD = np.asarray(hidden_program()(params["decoder"], tokens_1T, len(ids)), np.float64)[0]
    return (x_TD @ np.asarray(params["head"]["weight"], np.float64))[len(t.prompt_ids) - 1 : len(ids)]


def reference_gae(reward, values, after):
    advantages, carried = np.zeros(len(reward)), 0.0
    following = [*values[1:], after]
    for t in reversed(range(len(reward))):
        carried = reward[t] + GAMMA * following[t] - values[t] + GAMMA * LAM * carried
        advantages[t] = carried
    return advantages


def whitened(rows):
    flat = np.concatenate(rows)
    return [(row - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8) for row in rows]


@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_step_of_credit_equals_separate_rows_in_float64(bootstrap):
    made = critic(bootstrap)
    assigned, metrics = made.assign(TRAJECTORIES, REWARDS, PENALTY, TRUNCATED, None, Phases())
    values, advantages = {}, {}
    for i in LIVE:
        values[i] = reference_values(made, TRAJECTORIES[i])
        n = LENGTHS[i]
        reward = -PENALTY[i, :n].astype(float)
        reward[-1] += REWARDS[i]
        after = values[i][n] if bootstrap and TRUNCATED[i] else 0.0
        advantages[i] = reference_gae(reward, values[i][:n], after)
    expected = whitened([advantages[i] for i in LIVE])
    for i, advantage in zip(LIVE, expected, strict=True):
        value = values[i][: LENGTHS[i]]
        np.testing.assert_allclose(assigned[i].value, value, rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(assigned[i].value_target, advantages[i] + value, rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(assigned[i].advantage, advantage, rtol=5e-4, atol=5e-5)
    assert [t.value_target is None for t in assigned] == [False] * 4 + [True, True]
    assert [assigned[i].advantage for i in (4, 5)] == [0.0, 0.0]
    returns = np.concatenate([advantages[i] + values[i][:-1] for i in LIVE])
    errors = np.concatenate([advantages[i] for i in LIVE])
    np.testing.assert_allclose(metrics["critic/vf_explained_var"], 1 - errors.var() / returns.var(), rtol=1e-3)
    np.testing.assert_allclose(metrics["critic/returns/max"], returns.max(), rtol=2e-4)
    np.testing.assert_allclose(
        metrics["critic/values/mean"], np.concatenate([v[:-1] for v in values.values()]).mean(), rtol=2e-4, atol=1e-6
    )


def test_a_value_after_the_end_counts_only_where_the_response_was_cut():
    """Where nothing is masked or cut, the numbers are those of the hand-worked case."""
    value = np.array([[0.5, 0.6, 0.7, 9.0, 9.0]], np.float32)
    zeros = np.zeros((1, 5), np.float32)
    scores = Scores(np.float32([1]), zeros, value, np.float32([0]), np.int32([3]), np.array([True]))
    returns = credit_tokens(scores, gamma=0.9, lam=0.8)[1]
    np.testing.assert_allclose(returns, [[0.71712, 0.846, 1.0, 0, 0]], rtol=1e-6)
    cut = credit_tokens(scores._replace(after_N=np.float32([2])), gamma=0.9, lam=0.8)[1]
    np.testing.assert_allclose(cut[0, 2], 1.0 + 0.9 * 2, rtol=1e-6)


def test_the_value_loss_is_measured_from_the_values_at_sampling_time():
    made = critic()
    assigned, _ = made.assign(TRAJECTORIES, REWARDS, PENALTY, TRUNCATED, None, Phases())
    live = [assigned[i] for i in LIVE]
    old, target = (np.concatenate([getattr(t, name) for t in live]).astype(float) for name in ("value", "value_target"))
    first = made.learn(assigned, None, Phases())
    np.testing.assert_allclose(first["critic/vf_loss"], ((old - target) ** 2 / 2).mean(), rtol=1e-4)
    np.testing.assert_allclose(first["critic/vpred_mean"], old.mean(), rtol=1e-4, atol=1e-6)
    assert first["critic/vf_clipfrac"] == 0

    moved = np.concatenate([reference_values(made, t)[:-1] for t in live])
    clipped = np.clip(moved, old - CLIP, old + CLIP)
    worse = (clipped - target) ** 2 > (moved - target) ** 2
    second = made.learn(assigned, None, Phases())
    assert 0 < worse.sum() < len(worse)
    expected = np.maximum((moved - target) ** 2, (clipped - target) ** 2).mean() / 2
    np.testing.assert_allclose(second["critic/vf_loss"], expected, rtol=1e-3)
    np.testing.assert_allclose(second["critic/vf_clipfrac"], worse.mean(), rtol=1e-6)


def test_a_critic_begins_at_zero_and_learns_a_constant_reward():
    made = compiled(False)
    made.start(initial_params(job().network, job().config.seed))
    losses = []
    for _ in range(15):
        assigned, metrics = made.assign(TRAJECTORIES, np.ones(6, np.float32), None, TRUNCATED, None, Phases())
        losses.append(made.learn(assigned, None, Phases())["critic/vf_loss"])
        if len(losses) == 1:
            assert metrics["critic/values/max"] == metrics["critic/values/min"] == 0
    assert losses[-1] < 0.6 * losses[0]


def test_a_step_without_a_single_reward_leaves_the_weights():
    made = critic()
    before = jax.device_get(made.arrays()["critic"]["params"])
    assigned, metrics = made.assign(TRAJECTORIES, np.full(6, np.nan, np.float32), None, TRUNCATED, None, Phases())
    assert metrics == {}
    assert made.learn(assigned, None, Phases()) == {}
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(made.arrays()["critic"]["params"]))


def test_a_head_on_the_policys_decoder_values_and_learns_without_moving_it():
    shared = build(recipes.load(RECIPE, [*ONE_DEVICE, *SMALL, "algorithm.critic.decoder=shared"]))
    made = Critic(shared, shared.config.algorithm)
    policy = initial_params(shared.network, shared.config.seed)
    before = jax.device_get(policy)
    made.start(policy)
    arrays = made.arrays()
    assert set(arrays["critic"]["params"]) == {"head"}, "no second decoder, and none in a checkpoint"
    weight = arrays["critic"]["params"]["head"]["weight"]
    drawn = 0.3 * np.random.default_rng(0).standard_normal(weight.shape).astype(np.float32)
    arrays["critic"]["params"]["head"]["weight"] = jax.device_put(drawn, weight.sharding)
    made.restore(arrays)

    assigned, _ = made.assign(TRAJECTORIES, REWARDS, PENALTY, TRUNCATED, policy, Phases())
    whole = {"decoder": policy, "head": {"weight": drawn}}
    for i in LIVE:
        expected = values_of(whole, TRAJECTORIES[i])[:-1]
        np.testing.assert_allclose(assigned[i].value, expected, rtol=2e-4, atol=1e-5)
    losses = [made.learn(assigned, policy, Phases())["critic/vf_loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    assert not np.array_equal(made.arrays()["critic"]["params"]["head"]["weight"], drawn)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(policy))


def test_a_run_with_a_shared_decoder_learns_and_goes_on_from_its_checkpoint(tmp_path):
    shared = "algorithm.critic={decoder: shared, learning_rate: 3e-3}"
    for steps in (1, 2):
        run(recipes.load(RECIPE, [f"run_dir={tmp_path}", f"steps={steps}", *ONE_DEVICE, *SMALL, shared]))
    records = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["step"] > 0]
    assert [r["step"] for r in records] == [1, 2]
    assert records[0]["critic/values/max"] == records[0]["critic/values/min"] == 0
    assert records[1]["critic/values/max"] > records[1]["critic/values/min"]
    assert all(r["critic/grad_norm"] > 0 for r in records)


# ------------------------------------------------------------------------------------------------------ whole runs


def train(folder, steps):
    # Every rate stays: the optimizer's moments and the KL to the first model are what a resume could lose.
    run(recipes.load(RECIPE, [f"run_dir={folder}", f"steps={steps}", "algorithm.kl.coef=0.01", *ONE_DEVICE]))
    timed = ("timing_s/", "perf/", "compile/", "val-core/")
    return [{k: v for k, v in r.items() if not k.startswith(timed)} for r in read_metrics(folder / "metrics.jsonl")]


def saved(folder):
    """The critic and the policy of step 3, from its checkpoint."""
    config = recipes.load(folder / "config.yaml")
    whole = build(config)
    made = Critic(whole, config.algorithm)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        whole.network.abstract_params,
        whole.network.shardings(),
    )
    arrays, _ = Checkpointer(folder / "checkpoints", 2).restore(3, made.abstract_arrays() | {"params": params}, True)
    return jax.device_get(arrays)


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path):
    straight = train(tmp_path / "straight", 3)
    train(tmp_path / "halves", 2)
    assert train(tmp_path / "halves", 3)[1:] == straight[1:]
    names = {f"critic/{n}" for n in ("vf_loss", "vf_clipfrac", "vpred_mean", "vf_explained_var", "grad_norm", "lr")}
    names |= {f"critic/{n}/{kind}" for n in ("values", "returns", "rewards") for kind in ("mean", "max", "min")}
    assert names <= set(straight[-1])
    assert straight[1]["critic/values/max"] == straight[1]["critic/values/min"] == 0
    assert straight[2]["critic/values/max"] > straight[2]["critic/values/min"]
    assert straight[1]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert straight[3]["actor/reward_kl_penalty"] > 1e-4
    one, other = saved(tmp_path / "straight"), saved(tmp_path / "halves")
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert one["critic"]["step"] == 3 * 4  # two epochs of two mini-batches


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.bootstrap_truncated=true", "algorithm.drop_truncated=true"], "set one of them to false"),
        (["algorithm.bootstrap_truncated=true", "training.row_length=144"], "raise training.row_length"),
        (["algorithm.critic.value_clip=0"], "algorithm.critic.value_clip"),
        (["algorithm.lam=1.5"], "algorithm.lam"),
        (["algorithm.critic.learning_rat=1"], "learning_rate"),
    ],
)
def test_what_does_not_belong_together_is_refused_by_its_key(overrides, said):
    with pytest.raises(ValueError, match=said):
        recipes.load(RECIPE, overrides)
