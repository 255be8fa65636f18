"""Updates of every kind of run that were kept for a replay: it sees what they were given, and makes them again."""

import dataclasses
import math

import numpy as np
import pytest
from whole_runs import replayed_norms

from jaxrl_post import recipes
from jaxrl_post.loops import job, offline_job
from jaxrl_post.loops.critic import Critic
from jaxrl_post.loops.faulty_update import NumericFaultError, Skips
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.network import initial_params
from jaxrl_post.loops.offline_learner import OfflineLearner
from jaxrl_post.loops.teachers import Teachers
from jaxrl_post.observe.progress import Phases
from jaxrl_post.types import Trajectory
from launch.__main__ import main

SMALL = (
    "mesh.fsdp=1", "mesh.allow_unused_devices=true", "training.max_skipped_updates=2",
    "model.random={family: llama, layers: 1, hidden_size: 16, intermediate_size: 32}",
)  # fmt: skip
ONLINE = (*SMALL, "data.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=4")
ONE_UPDATE = ("algorithm.epochs=1", "algorithm.mini_batches=1")
PHASES = Phases()


class Faulty(Skips):
    """Takes every update for one to skip: what is kept then is finite, and is to be found again."""

    def note(self, skipped, *arguments, **keys):
        super().note(True, *arguments, **keys)


def trajectories(online, **keys):
    """Two groups of two."""
    rng = np.random.default_rng(0)
    prompts = online.train_prompts[:2]
    return [
        Trajectory(
            i // 2, prompts[i // 2].ids, np.int32(rng.integers(0, 200, 4)), np.full(4, -5.0, np.float32), advantage,
            lesson=prompts[i // 2].lesson, **keys,
        )
        for i, advantage in enumerate((1.0, -1.0, 0.5, -0.5))
    ]  # fmt: skip


def loaded(teachers):
    teachers.load()
    return teachers


def fail_policy(config):
    online = job.build(config)
    learner = Learner(online, loaded(Teachers(online.teachers)))
    learner._skips = Faulty(config)
    state = learner.trained.start(initial_params(online.network, 0))
    while True:
        state, _ = learner.learn(state, trajectories(online), PHASES)


def fail_critic(config):
    online = job.build(config)
    critic, policy = Critic(online, config.algorithm), initial_params(online.network, 0)
    critic.start(policy)
    critic._skips = Faulty(config, "critic")
    targets = trajectories(online, value=np.zeros(4, np.float32), value_target=np.arange(4, dtype=np.float32))
    critic.learn(targets, policy, PHASES)


def fail_offline(config):
    files = offline_job.build(config)
    learner = OfflineLearner(files, loaded(Teachers(files.teachers)))
    learner._skips = Faulty(config)
    start = initial_params(files.network, 0)
    if learner.needs_reference:
        learner.keep_reference(start)
    state = learner.trained.start(start)
    for _ in range(2):
        state, _ = learner.learn(state, files.examples[: config.data.examples_per_step], PHASES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fail", "keys", "folder"),
    [
        ("distillation", fail_policy, ONLINE, "update_000002"),
        ("self_distillation", fail_policy, ONLINE, "update_000002"),
        ("ppo_shared_critic", fail_critic, ONLINE, "critic_update_000002"),
        ("ppo", fail_critic, (*ONLINE, "algorithm.mini_batches=2"), "critic_update_000002"),
        ("sft", fail_offline, SMALL, "update_000002"),
        ("dpo", fail_offline, SMALL, "update_000002"),
        ("kto", fail_offline, SMALL, "update_000002"),
        ("bco", fail_offline, SMALL, "update_000002"),
        ("reward_model", fail_offline, SMALL, "update_000002"),
        ("sft_distillation", fail_offline, SMALL, "update_000002"),
    ],
)
def test_a_replay_has_the_gradient_of_the_update(kind, fail, keys, folder, tmp_path, capsys):
    config = recipes.load(f"configs/tiny/{kind}.yaml", [f"run_dir={tmp_path}", *keys])
    kept = tmp_path / "faults" / folder
    with pytest.raises(NumericFaultError) as raised:
        fail(config)
    assert str(raised.value).endswith(f"are kept in {kept}: python -m launch {kept}/config.yaml --replay {kept}")
    here, there = replayed_norms(kept, capsys)
    np.testing.assert_allclose(here, there, rtol=1e-4)


@pytest.mark.slow
def test_skipped_updates_of_a_critic_count_and_end_the_run(tmp_path, capsys):
    """One good update in between starts the count anew."""
    config = recipes.load("configs/tiny/ppo.yaml", [f"run_dir={tmp_path}", *ONLINE, *ONE_UPDATE])
    online = job.build(config)
    critic, policy = Critic(online, config.algorithm), initial_params(online.network, 0)
    critic.start(policy)
    value = np.zeros(4, np.float32)
    good = trajectories(online, value=value, value_target=np.ones(4, np.float32))
    bad = [dataclasses.replace(t, value_target=np.float32([1, 1, math.nan, 1])) for t in good]
    counts = [critic.learn(which, policy, PHASES)["training/skipped_critic_updates"] for which in (bad, good, bad)]
    assert counts == [1, 0, 1]
    with pytest.raises(NumericFaultError, match=r"=2: so many updates of the critic in a row had a loss or gradient"):
        critic.learn(bad, policy, PHASES)
    [kept] = (tmp_path / "faults").iterdir()
    assert kept.name == "critic_update_000004"
    assert main([str(kept / "config.yaml"), "--replay", str(kept)]) == 0
    said = capsys.readouterr().out
    assert "first place that is not finite: batch field advantage[" in said
    assert said.endswith("the update was skipped\n")


def test_a_replay_of_another_recipe_is_refused(tmp_path, capsys):
    (tmp_path / "fault.json").write_text('{"of": "critic", "n_micro": 1, "constant": null}')
    assert main(["configs/tiny/grpo.yaml", *ONLINE, "--replay", str(tmp_path)]) == 2
    assert "an update of a critic, which algorithm.kind=grpo lacks" in capsys.readouterr().err
