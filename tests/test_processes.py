"""Runs of several processes against runs of one on as many devices: the same samples, losses and gradients."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import whole_runs

from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.observe.watchdog import STUCK

TINY = Path(__file__).parents[1] / "configs" / "tiny"
COMPARED = {  # of each step
    "online": ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "response_length/mean"),
    "offline": ("loss", "actor/grad_norm"),
}


def launched(run_dir, kind, processes, devices, *overrides, options=(), code=0):
    """Run a tiny recipe as so many processes of so many devices; what it said."""
    command = [sys.executable, "-m", "launch", str(TINY / f"{kind}.yaml"), f"run_dir={run_dir}", *overrides]
    command += ["--processes", str(processes), "--devices-per-process", str(devices), *options]
    environ = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
    }
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_same_run(ours, theirs, steps, loop="online"):
    """Equal ids, and losses to the rounding of sums in another order."""
    ours_by_step, theirs_by_step = (
        {record["step"]: record for record in read_metrics(folder / "metrics.jsonl")} for folder in (ours, theirs)
    )
    assert max(ours_by_step) == max(theirs_by_step) == steps
    for step in range(1, steps + 1):
        for name in COMPARED[loop]:
            a, b = ours_by_step[step][name], theirs_by_step[step][name]
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=f"{name} of step {step}")
        if loop == "online":
            a, b = whole_runs.rollouts(ours, step), whole_runs.rollouts(theirs, step)
            assert [sample["ids"] for sample in a] == [sample["ids"] for sample in b]
            assert [sample["completion"] for sample in a] == [sample["completion"] for sample in b]
            assert [sample["reward"] for sample in a] == [sample["reward"] for sample in b]


FOUR = ("mesh.data=2", "mesh.fsdp=2")
EIGHT = ("mesh.data=2", "mesh.fsdp=4")
SMALL = ("evaluation.enabled=false", "rollout.max_new_tokens=8", "model.random.layers=1")
STEPS = ("steps=2", "evaluation.every=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        ("grpo", "online"),
        ("ppo", "online"),
        ("dapo", "online"),
        ("partial_rollout", "online"),
        ("opd", "online"),
        ("sft", "offline"),
        ("dpo", "offline"),
        ("kto", "offline"),
    ],
)
def test_two_processes_are_one_run(tmp_path, kind, loop):
    overrides = (*STEPS, *FOUR, *(("data.held_out_fraction=0.25",) if loop == "offline" else ()))
    said = launched(tmp_path / "two", kind, 2, 2, *overrides)
    assert said.count("step 2/2") == 1  # one process speaks
    launched(tmp_path / "one", kind, 1, 4, *overrides)
    check_same_run(tmp_path / "two", tmp_path / "one", 2, loop)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "loop", "batch"), [("grpo", "online", "prompts"), ("dpo", "offline", "examples")])
def test_four_processes_are_one_run(tmp_path, kind, loop, batch):
    size = f"data.{batch}_per_step=8"
    launched(tmp_path / "four", kind, 4, 2, *STEPS, *EIGHT, size)
    launched(tmp_path / "one", kind, 1, 8, *STEPS, *EIGHT, size)
    check_same_run(tmp_path / "four", tmp_path / "one", 2, loop)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    overrides = ("steps=4", "checkpoint.every=1", "checkpoint.keep_last=4", *SMALL)
    launched(tmp_path / "whole", "grpo", 2, 2, *overrides, *FOUR)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / str(step))
    said = launched(tmp_path / "resumed", "grpo", 1, 4, *overrides, "mesh.fsdp=4")
    assert "resuming after step 2" in said
    check_same_run(tmp_path / "resumed", tmp_path / "whole", 4)


REWARD = """
import os, jax
from jaxrl_post.rewards.text import digit_fraction

calls = 0

def reward(prompts, completions, rows):
    global calls
    calls += 1
    here = os.environ["FAULT_FOLDER"] + "/fault"
    if calls == 2 and jax.process_index() == 1 and not os.path.exists(here):
        open(here, "w").close()
        FAULT
    return digit_fraction(prompts, completions, rows)
"""


def faulty(tmp_path, monkeypatch, fault, every=1):
    """Options of a recipe whose reward has this fault in step 2 on process 1, the first time."""
    (tmp_path / "faulty_reward.py").write_text(REWARD.replace("FAULT\n", f"{fault}\n"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
    monkeypatch.setenv("FAULT_FOLDER", str(tmp_path))
    return (
        "steps=3",
        f"checkpoint.every={every}",
        "reward.function=faulty_reward:reward",
        "reward.workers=0",  # the fault is to hit the run itself
        "reward.per=step",
        "reward.failure_score=null",
        "mesh.fsdp=2",
        *SMALL,
    )


@pytest.mark.slow
def test_a_killed_process_costs_no_step(tmp_path, monkeypatch):
    overrides = faulty(tmp_path, monkeypatch, "os.kill(os.getpid(), 9)")
    said = launched(tmp_path / "killed", "grpo", 2, 1, *overrides, options=("--max-restarts", "1"))
    assert "process 1 ended with code 137" in said
    assert "resuming after step 1" in said
    launched(tmp_path / "whole", "grpo", 2, 1, *overrides)
    check_same_run(tmp_path / "killed", tmp_path / "whole", 3)


@pytest.mark.slow
def test_an_error_of_one_process_ends_all_and_is_told(tmp_path, monkeypatch):
    overrides = faulty(tmp_path, monkeypatch, "raise KeyError('no such answer')")
    said = launched(tmp_path / "run", "grpo", 2, 1, *overrides, options=("--max-restarts", "3"), code=2)
    assert "error: process 1 of 2: RewardError: reward faulty_reward:reward, sample 0" in said
    assert "restart" not in said


@pytest.mark.slow
def test_a_process_that_hangs_is_named_and_costs_no_step(tmp_path, monkeypatch):
    overrides = (*faulty(tmp_path, monkeypatch, "import time; time.sleep(3600)"), "watchdog_minutes=2")
    said = launched(tmp_path / "run", "grpo", 2, 1, *overrides, options=("--max-restarts", "1"))
    logs = "".join((tmp_path / "run" / "logs" / f"process_{i}.log").read_text() for i in range(2))
    assert "stuck: reward has lasted 2 minutes" in logs
    assert "process 0: reward, waiting for the others\nprocess 1: reward\n" in logs
    assert "resuming after step 1" in said
    assert "step 3/3" in said


@pytest.mark.slow
def test_a_process_that_hangs_before_the_first_step_is_named(tmp_path, monkeypatch):
    overrides = faulty(tmp_path, monkeypatch, "pass")
    hang = "import jax, time\nif jax.process_index() == 1:\n    time.sleep(3600)\n"
    (tmp_path / "faulty_reward.py").write_text(hang + REWARD)
    launched(tmp_path / "run", "grpo", 2, 1, *overrides, "watchdog_minutes=0.3", code=STUCK)
    logs = "".join((tmp_path / "run" / "logs" / f"process_{i}.log").read_text() for i in range(2))
    assert "stuck: start has lasted 0.3 minutes" in logs
    assert "process 0: start, waiting for the others\nprocess 1: start\n" in logs


@pytest.mark.slow
def test_a_stop_saves_and_the_run_goes_on_from_it(tmp_path, monkeypatch):
    overrides = faulty(tmp_path, monkeypatch, "os.kill(os.getpid(), 15)", every=0)
    said = launched(tmp_path / "run", "grpo", 2, 1, *overrides)
    assert "told to stop: step 2 is saved" in said
    assert "step 3/3" not in said
    assert "resuming after step 2" in launched(tmp_path / "run", "grpo", 2, 1, *overrides)
    launched(tmp_path / "whole", "grpo", 2, 1, *overrides)
    check_same_run(tmp_path / "run", tmp_path / "whole", 3)
