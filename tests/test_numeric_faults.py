"""Updates without a finite gradient: skipped, counted, kept and replayed; numbers that jump raise an alarm."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_runs import replayed_norms

from jaxrl_post import config, recipes
from jaxrl_post.config_alerts import Alerts as Options
from jaxrl_post.loops.faulty_update import NumericFaultError
from jaxrl_post.loops.job import build
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.network import initial_params
from jaxrl_post.observe.alerts import Alerts, FailedRewardsError, as_metrics
from jaxrl_post.observe.progress import Phases
from jaxrl_post.training.optimizer import make_optimizer
from jaxrl_post.training.state import TrainState
from jaxrl_post.training.update import apply_gradients, placed_gradient
from jaxrl_post.types import Trajectory
from launch.__main__ import main

RECIPE = "configs/tiny/grpo.yaml"
SMALL = (
    "mesh.fsdp=1", "mesh.allow_unused_devices=true", "data.prompts_per_step=2", "rollout.samples_per_prompt=2",
    "rollout.max_new_tokens=4", "model.random={family: llama, layers: 1, hidden_size: 16, intermediate_size: 32}",
    "training.max_skipped_updates=2", "training.tokens_per_microbatch=256",
)  # fmt: skip


def trajectories(job, bad):
    """Two groups of two; `bad` is the advantage of the third sample."""
    rng = np.random.default_rng(0)
    prompts = [prompt.ids for prompt in job.train_prompts[:2]]
    made = [
        Trajectory(i // 2, prompts[i // 2], np.int32(rng.integers(0, 200, 4)), np.full(4, -5.0, np.float32), advantage)
        for i, advantage in enumerate((1.0, -1.0, 1.0, -1.0))
    ]
    made[2] = dataclasses.replace(made[2], advantage=bad)
    return made


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The folder of a run that was given NaN and infinity, its metrics step by step, and its weights before each."""
    folder = tmp_path_factory.mktemp("run")
    job = build(recipes.load(RECIPE, [f"run_dir={folder}", *SMALL]))
    learner, phases, metrics, weights = Learner(job), Phases(), [], []
    state = learner.trained.start(initial_params(job.network, 0))
    for bad in (math.nan, 1.0, math.inf, math.nan):
        weights.append(jax.device_get(state.params))
        try:
            state, found = learner.learn(state, trajectories(job, bad), phases)
        except NumericFaultError as fault:
            return folder, metrics, weights, str(fault)
        metrics.append(found)
    raise AssertionError("nothing was raised")


def differ(one, other):
    return any(np.any(a != b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_an_update_without_finite_gradient_is_skipped_and_counted(learned):
    _, metrics, weights, _ = learned
    assert [m["training/skipped_updates"] for m in metrics] == [1, 0, 1]
    assert [differ(*pair) for pair in itertools.pairwise(weights)] == [False, True, False]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(weights))


def test_a_loss_that_is_not_finite_skips_its_update_though_the_gradient_is():
    """Of three micro-losses, added up as an update adds them, the second is infinite with a gradient of 1."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loss = lambda params, x: (params["w"] * 1.0 + jax.lax.stop_gradient(x), x)
    gradient = jax.jit(placed_gradient(loss, {"w": device}))
    optimizer = make_optimizer(config.Optimizer(learning_rate=0.1, max_grad_norm=None), steps=3)
    params = {"w": np.float32(2.0)}
    state = TrainState(params, optimizer.transform.init(params), np.int32(0))
    for offsets, skipped, norm in (((0.0, 5.0, -3.0), 0, 3.0), ((0.0, math.inf, 0.0), 1, math.nan)):
        grads = sum(np.asarray(gradient(params, np.float32(x))[0]["w"]) for x in offsets)
        moved, metrics = apply_gradients(optimizer, state, {"w": jnp.asarray(grads)}, jnp.bool_(True))
        assert float(metrics["actor/skipped_update"]) == skipped
        assert (float(moved.params["w"]) == 2.0) == bool(skipped)
        np.testing.assert_equal(float(metrics["actor/grad_norm"]), norm)


def test_too_many_in_a_row_end_the_run_and_are_kept(learned):
    """One good update in between starts the count anew."""
    folder, *_, said = learned
    kept = folder / "faults" / "update_000004"
    assert said.startswith("training.max_skipped_updates=2: so many updates of the policy in a row had a loss or")
    assert said.endswith(f"are kept in {kept}: python -m launch {kept}/config.yaml --replay {kept}")
    assert {path.name for path in kept.iterdir()} == {"batch.npz", "checkpoints", "config.yaml", "fault.json"}


@pytest.mark.slow
def test_what_was_kept_is_replayed_and_names_the_first_place(learned, capsys):
    kept = learned[0] / "faults" / "update_000004"
    assert main([str(kept / "config.yaml"), "--replay", str(kept)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("loss nan over ")
    assert "first place that is not finite: batch field advantage[" in said
    assert said.endswith("the update was skipped\n")
    assert "gradient norm nan here, nan in the update" in said


@pytest.mark.slow
def test_a_replay_sees_the_gradient_of_the_update(learned, capsys):
    """Of the same batch with a finite advantage in its place."""
    kept = learned[0] / "faults" / "update_000004"
    arrays = dict(np.load(kept / "batch.npz"))
    arrays["advantage"] = np.nan_to_num(arrays["advantage"], nan=0.5)
    np.savez(kept / "batch.npz", **arrays)
    here, there = replayed_norms(kept, capsys)
    np.testing.assert_allclose(here, there, rtol=1e-5)


def test_a_replay_of_nothing_is_refused(tmp_path, capsys):
    assert main([RECIPE, *SMALL, "--replay", str(tmp_path)]) == 2
    assert f"error: --replay {tmp_path}: no fault.json in it" in capsys.readouterr().err


def looked(values, name="critic/rewards/mean", **options):
    """The steps that raise an alarm."""
    alerts = Alerts(Options(**options))
    return [i for i, value in enumerate(values) if alerts.look({name: value})]


@pytest.mark.parametrize(
    ("values", "alarms"),
    [
        ([0.5, 0.52] * 10, []),
        ([0.5, 0.52] * 10 + [0.1], [20]),
        ([0.5, 0.52] * 10 + [0.8, 0.1], [20, 21]),
        ([0.02 * i for i in range(40)], []),
        ([0.5, 0.52, 0.1], []),  # nothing is usual yet
        ([0.5] * 20 + [0.52], []),  # a tremor
        ([0.0] * 20 + [0.1], []),  # the first success
        ([0.5] * 3 + [math.nan] + [0.5], [3]),
    ],
)
def test_jumps(values, alarms):
    assert looked(values, window=8) == alarms


def test_rewards_that_fail_on_all_samples_raise_an_alarm_and_end_the_run_where_asked():
    alerts = Alerts(Options(failed_reward_steps=2))
    failed = {"reward/all_failed": 1.0, "reward/failed": 8.0, "reward/timeouts": 6.0, "reward/crashes": 2.0}
    assert alerts.look(failed) == {
        "reward/all_failed": "a reward failed on all of its samples (8 failed, 6 timeouts, 2 crashes)"
    }
    alerts.check()
    assert alerts.look(failed | {"reward/all_failed": 0.0}) == {}
    alerts.look(failed)
    alerts.check()
    alerts.look(failed)
    with pytest.raises(FailedRewardsError, match=r"alerts.failed_reward_steps=2: a reward failed on all samples"):
        alerts.check()
    patient = Alerts(Options())
    assert all(patient.look(failed) for _ in range(9))
    patient.check()


def test_limits_and_what_is_told():
    assert looked([0.1, -0.3, 0.2], "actor/ppo_kl", limits={"actor/ppo_kl": 0.2}) == [1]
    alerts = Alerts(Options(window=4))
    for value in (1.0, 2.0, 1.0, 2.0, 1.0):
        assert alerts.look({"actor/grad_norm": value}) == {}
    reasons = alerts.look({"actor/grad_norm": 101.0, "other": math.nan})
    assert reasons == {"actor/grad_norm": "actor/grad_norm went from 1 to 101, 100 times its usual change"}
    assert as_metrics(reasons) == {"alert/actor/grad_norm": 1.0}
