"""Whole runs of the tiny recipe: what the first update must show, exact resume, meshes, and options of the loop."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from whole_runs import numbers, rollouts

from jaxrl_post import recipes
from jaxrl_post.loops.online import run
from jaxrl_post.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "configs" / "tiny" / "grpo.yaml"
ONE_DEVICE = ["mesh.fsdp=1", "mesh.allow_unused_devices=true"]


def train(run_dir, *overrides, mesh=ONE_DEVICE):
    run(recipes.load(RECIPE, [f"run_dir={run_dir}", *mesh, *overrides]))
    return read_metrics(Path(run_dir) / "metrics.jsonl")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Five steps without interruption, in process."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(folder, "steps=5")


def test_the_first_update_is_on_policy(straight):
    folder, records = straight
    first = records[1]
    assert first["step"] == 1
    samples = rollouts(folder, 1)
    lengths = np.array([len(s["ids"]) for s in samples])
    advantages = np.array([s["advantage"] for s in samples])
    np.testing.assert_allclose(first["actor/pg_loss"], -(advantages * lengths).sum() / lengths.sum(), atol=1e-6)
    assert abs(first["actor/ppo_kl"]) < 1e-6
    assert first["actor/pg_clipfrac"] == 0
    assert first["rollout_corr/logp_abs_diff_max"] < 1e-4
    assert first["actor/grad_norm"] > 0


def test_every_step_compares_sampler_and_trainer_in_full(straight):
    """Computed from the update's own log-probs: no forward pass of its own, so it costs nothing to log always."""
    _, records = straight
    for record in records[1:]:
        assert abs(record["rollout_corr/kl"]) < 1e-5
        assert abs(record["rollout_corr/chi2_seq"]) < 1e-3
        np.testing.assert_allclose(record["rollout_corr/ppl_ratio"], 1.0, atol=1e-4)
        np.testing.assert_allclose(record["rollout_corr/training_ppl"], record["rollout_corr/rollout_ppl"], rtol=1e-4)


def test_advantages_are_centred_and_scaled_within_each_group(straight):
    folder, _ = straight
    samples = rollouts(folder, 2)
    for start in range(0, len(samples), 8):
        rewards = np.array([s["reward"] for s in samples[start : start + 8]])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        np.testing.assert_allclose([s["advantage"] for s in samples[start : start + 8]], expected, atol=1e-5)


def test_nothing_is_compiled_after_the_second_step(straight):
    _, records = straight
    assert 0 < records[1]["compile/count"] <= 12
    assert [r["compile/count"] for r in records[3:5]] == [0, 0]


def test_a_run_leaves_its_config_curve_and_checkpoints(straight):
    folder, _ = straight
    assert recipes.load(folder / "config.yaml").steps == 5
    assert (folder / "reward.png").stat().st_size > 10_000
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdecimal()) == [4, 5]


def launch(run_dir, steps, **environment):
    command = [sys.executable, "-m", "launch", str(RECIPE), f"run_dir={run_dir}", f"steps={steps}", *ONE_DEVICE]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True)


def test_killed_and_run_again_equals_never_stopped(tmp_path, straight):
    """SIGKILL in the middle of step 3 or 4, then a new process: metrics and samples are the uninterrupted run's, bit
    for bit; the samples of steps already learned from are not drawn again."""
    folder, records = straight
    killed = launch(tmp_path, 5)
    for line in killed.stdout:
        if line.lstrip().startswith("step 3/"):
            break
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] < 5

    resumed = launch(tmp_path, 5)
    text, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0
    assert "resuming after step" in text
    again = read_metrics(tmp_path / "metrics.jsonl")
    assert [numbers(r) for r in again] == [numbers(r) for r in records]
    for step in range(1, 6):
        assert rollouts(tmp_path, step) == rollouts(folder, step)


def test_a_finished_run_is_left_alone_and_more_steps_go_on(tmp_path, straight, capsys):
    folder, _ = straight
    before = (folder / "metrics.jsonl").read_bytes()
    run(recipes.load(RECIPE, [f"run_dir={folder}", "steps=5", *ONE_DEVICE]))
    assert "already" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match=r"holds checkpoints up to step 5 and checkpoint\.resume=false"):
        run(recipes.load(RECIPE, [f"run_dir={folder}", "steps=9", "checkpoint.resume=false", *ONE_DEVICE]))


@pytest.mark.parametrize("mesh", [["mesh.data=8", "mesh.fsdp=1"], ["mesh.fsdp=4", "mesh.tensor=2"]])
def test_every_mesh_samples_and_learns_alike(tmp_path, straight, mesh):
    """Ids of the second step are drawn after an update: equal ids mean equal updates to within a draw's resolution."""
    folder, records = straight
    other = train(tmp_path, "steps=2", "evaluation.enabled=false", mesh=mesh)
    for step in (1, 2):
        assert [s["ids"] for s in rollouts(tmp_path, step)] == [s["ids"] for s in rollouts(folder, step)]
    np.testing.assert_allclose(other[0]["actor/grad_norm"], records[1]["actor/grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(other[0]["actor/pg_loss"], records[1]["actor/pg_loss"], atol=1e-5)


def test_micro_batches_and_slots_change_no_number(tmp_path, straight):
    folder, records = straight
    split = ["training.tokens_per_microbatch=256", "rollout.slots=16", "rollout.refill=8"]
    other = train(tmp_path, "steps=2", "evaluation.enabled=false", *split)
    assert other[0]["training/micro_batches"] > records[1]["training/micro_batches"]
    assert [s["ids"] for s in rollouts(tmp_path, 2)] == [s["ids"] for s in rollouts(folder, 2)]
    np.testing.assert_allclose(other[0]["actor/grad_norm"], records[1]["actor/grad_norm"], rtol=1e-5)


def test_several_updates_a_step_move_away_from_a_fixed_old_policy_and_reference(tmp_path):
    several = ["algorithm.epochs=2", "algorithm.mini_batches=2", "algorithm.old_logprobs=trainer"]
    kl = ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3", "rollout.top_k=50", "checkpoint.every=0"]
    records = train(tmp_path, "steps=2", "evaluation.enabled=false", "optimizer.learning_rate=1e-2", *several, *kl)
    first, second = records
    assert first["actor/ppo_kl"] != 0
    assert first["actor/kl_loss"] > 0  # a mean over four updates: 0 at the first, then above
    assert second["actor/kl_loss"] > first["actor/kl_loss"]


def test_truncated_samples_can_be_left_out(tmp_path):
    records = train(tmp_path, "steps=1", "evaluation.enabled=false", "algorithm.drop_truncated=true")
    samples = rollouts(tmp_path, 1)
    live = [s for s in samples if s["stop"] == "stop"]
    assert 0 < len(live) < len(samples)
    assert records[0]["training/trained_sequences"] == sum(s["advantage"] != 0 for s in live)
    lengths = np.array([len(s["ids"]) for s in live])
    advantages = np.array([s["advantage"] for s in live])
    np.testing.assert_allclose(records[0]["actor/pg_loss"], -(advantages * lengths).sum() / lengths.sum(), atol=1e-6)


def test_a_step_without_signal_moves_nothing(tmp_path):
    """Equal rewards in all groups: no micro-batch runs, parameters stay, and the run goes on."""
    records = train(tmp_path, "steps=2", "evaluation.enabled=false", "reward.function=tests_rewards:always_one")
    assert [r["training/micro_batches"] for r in records] == [0, 0]
    assert "actor/grad_norm" not in records[0]


@pytest.fixture(autouse=True, scope="session")
def _reward_module(tmp_path_factory):
    """A module of user rewards on the import path."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "tests_rewards.py").write_text(
        "def always_one(prompts, completions, rows):\n    return [1.0] * len(rows)\n"
    )
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
