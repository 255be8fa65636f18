"""A trained reward model as a run's reward: whose numbers it gives, where it lives, what is refused at the start."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_post import config, config_rewards, recipes
from jaxrl_post.data.tokenizer import ByteTokenizer
from jaxrl_post.loops.gather import grade
from jaxrl_post.loops.job import build
from jaxrl_post.loops.offline import run as run_offline
from jaxrl_post.loops.online import run
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.rewards.model import RewardModel, Setting
from jaxrl_post.rewards.reward import build_reward
from jaxrl_post.rollout.sampler import Rollout
from jaxrl_post.types import Completion, StopReason
from sharding.mesh import make_mesh

ROOT = Path(__file__).parent.parent
TINY = ROOT / "configs" / "tiny"
ONE_DEVICE = ["mesh.fsdp=1", "mesh.allow_unused_devices=true"]
FOUR_BY_TWO = ["mesh.fsdp=4", "mesh.tensor=2"]
ALONG_TIME = ["mesh.fsdp=2", "mesh.sequence=4"]
SETTING = Setting(config.Mesh(), ByteTokenizer(), ByteTokenizer.vocab_size, max_tokens=16, samples=4)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a reward model trained on one device for two steps."""
    folder = tmp_path_factory.mktemp("reward")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        run_offline(recipes.load(TINY / "reward_model.yaml", [f"run_dir={folder}", "steps=2", *ONE_DEVICE]))
    return folder


def job_of(folder, *overrides):
    recipe = recipes.load(
        TINY / "grpo_reward_model.yaml", ["run_dir=runs/none", f"reward.run_dir={folder}", *overrides]
    )
    return build(recipe)


def drawn(job, samples=3):
    """Completions of random bytes, 1 to 16 of them, for four of the job's prompts."""
    rng = np.random.default_rng(0)
    zeros = np.zeros(1, np.float32)
    completions = [
        Completion(p, rng.integers(32, 127, rng.integers(1, 17)).astype(np.int32), zeros, zeros, StopReason.LENGTH)
        for p in range(4)
        for _ in range(samples)
    ]
    return job.train_prompts[:4], Rollout(completions, (1,), (1,))


@pytest.mark.parametrize("mesh", [FOUR_BY_TWO, pytest.param(ALONG_TIME, marks=pytest.mark.slow)])
def test_scores_are_the_reward_models_own_on_every_mesh(trained, mesh):
    """It was trained on one device; here each of eight devices holds its part of weights and rows."""
    job = job_of(trained, *mesh)
    prompts, rollout = drawn(job)
    texts, scores = grade(job, prompts, rollout)
    alone = RewardModel(trained, max_tokens=100, tokens_per_batch=100)
    expected = [alone([prompts[c.prompt].ids], [c.ids.tolist()])[0] for c in rollout.completions]
    np.testing.assert_allclose(scores.total_N, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(scores.heads_NK[:, 0], scores.total_N)
    assert len(set(scores.total_N)) == 12
    assert texts[0] == bytes(rollout.completions[0].ids.tolist()).decode()


def test_it_reads_ids_and_not_text(trained):
    """Ids of the padded vocabulary have no text: by text both completions would be the same."""
    job = job_of(trained, *ONE_DEVICE)
    zeros = np.zeros(1, np.float32)
    ids = [np.array(x, np.int32) for x in ([65, 257], [65, 263])]
    rollout = Rollout([Completion(0, x, zeros, zeros, StopReason.STOP) for x in ids], (1,), (1,))
    texts, scores = grade(job, job.train_prompts[:1], rollout)
    assert texts == ["A", "A"]
    assert scores.total_N[0] != scores.total_N[1]


def test_its_weights_are_cut_over_the_runs_mesh(trained):
    model = RewardModel(trained, 16, mesh=config.Mesh(fsdp=4, tensor=2))
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    leaves = jax.tree.leaves(model._params)
    assert all(leaf.sharding.mesh == mesh for leaf in leaves)
    assert sum(leaf.addressable_shards[0].data.size for leaf in leaves) < sum(leaf.size for leaf in leaves) / 4


def test_more_answers_than_a_call_takes_go_in_several(trained):
    prompts, answers = [(1, 2, 3)] * 7, [(4,) * n for n in range(1, 8)]
    ask = lambda **options: RewardModel(trained, 10, 20, mesh=config.Mesh(fsdp=1, allow_unused_devices=True), **options)
    np.testing.assert_allclose(ask(answers_per_call=3)(prompts, answers), ask()(prompts, answers), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_learns_from_it(trained, tmp_path):
    overrides = [f"run_dir={tmp_path}", f"reward.run_dir={trained}", "steps=2", "checkpoint.every=0", *ONE_DEVICE]
    run(recipes.load(TINY / "grpo_reward_model.yaml", overrides))
    before, first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first["critic/score/max"] > first["critic/score/min"]
    assert first["actor/grad_norm"] > 0
    assert second["critic/score/mean"] != first["critic/score/mean"]
    assert np.isfinite(before["val-core/arithmetic_add/acc/mean@1"])


def test_what_is_no_reward_model_is_refused_before_any_weight(tmp_path):
    with pytest.raises(ValueError, match=r"reward\.run_dir=.*gone.*has no config\.yaml; give the recipe's run_dir"):
        job_of(tmp_path / "gone")
    (tmp_path / "config.yaml").write_text(recipes.dump(recipes.load(TINY / "grpo.yaml")), encoding="utf-8")
    with pytest.raises(ValueError, match=r"reward\.run_dir=.*algorithm\.kind=grpo, which has no scores"):
        job_of(tmp_path)
    (tmp_path / "config.yaml").write_text(recipes.dump(recipes.load(TINY / "reward_model.yaml")), encoding="utf-8")
    with pytest.raises(ValueError, match=r"reward\.run_dir=.*no checkpoints yet: train it first"):
        job_of(tmp_path)


@dataclasses.dataclass(frozen=True)
class Swapped:
    """Ids 65 and 66 mean each other's letter."""

    vocab_size: int = 264

    def decode(self, ids, skip_special=True):
        return ByteTokenizer().decode([{65: 66, 66: 65}.get(i, i) for i in ids], skip_special)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": Swapped()}, "token id 65 is 'B' to the policy and 'A' to the reward model"),
        ({"vocab_size": 300}, "its vocabulary of 264 has no place for the policy's of 300"),
        ({"max_tokens": 9000}, "max_tokens=9000 exceeds the 8192 positions"),
        ({"mesh": config.Mesh(fsdp=3, allow_unused_devices=True)}, r"cannot be cut over mesh fsdp=3"),
    ],
)
def test_a_reward_model_that_does_not_fit_the_run(trained, change, message):
    reward = config_rewards.ModelReward(kind="model", run_dir=str(trained))
    with pytest.raises(ValueError, match=message):
        build_reward(reward, dataclasses.replace(SETTING, **change))


def test_a_run_does_not_overwrite_its_reward_model():
    with pytest.raises(recipes.RecipeError, match=r"reward\.run_dir=runs/x is this run's own run_dir"):
        recipes.load(TINY / "grpo_reward_model.yaml", ["run_dir=runs/x", "reward.run_dir=runs/x"])
