"""Runs killed by SIGKILL in any phase and started again are the runs that were never stopped, bit for bit."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import numbers, rollouts

from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent


def check_kills(folder, steps, seed, count, kind="plain"):
    """Kills at every moment, goes on, compares. Returns the steps kept and host state at the end, and all metrics."""
    command = [sys.executable, "tests/killed_runs.py", str(folder), kind, *map(str, (steps, seed, count))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = [line for line in done.stdout.splitlines() if " in " in line or "to the end" in line]
    told = [line for line in told if line.split()[0].isdecimal()]
    print("\n".join(told))
    assert done.returncode == 0, done.stderr[-3000:]
    *killed, end = [int(line.split()[0]) for line in told]
    assert (len(killed), end) == (count, 0), done.stderr[-3000:]
    assert killed == [signal.SIGKILL] * count, done.stderr[-3000:]
    straight, again = (read_metrics(folder / name / "metrics.jsonl") for name in ("straight", "killed"))
    assert [record["step"] for record in straight] == list(range(1, steps + 1))
    assert [numbers(record) for record in again] == [numbers(record) for record in straight]
    for step in range(1, steps + 1):
        assert rollouts(folder / "killed", step) == rollouts(folder / "straight", step)
    kept, host = host_state(folder / "straight")
    assert host_state(folder / "killed") == (kept, host)
    return kept, host, straight


def host_state(run_dir):
    """The steps that are kept, and all of the newest that is no array: positions, what is carried, records."""
    with contextlib.closing(Checkpointer(run_dir / "checkpoints", keep_last=1)) as checkpoints:
        steps = checkpoints.steps()
        return steps, checkpoints.restore_host(steps[-1])


@pytest.mark.slow
def test_killed_twice(tmp_path):
    check_kills(tmp_path, steps=6, seed=2, count=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_twenty_random_moments(tmp_path):
    check_kills(tmp_path, steps=44, seed=1, count=20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_with_partial_rollouts_under_way(tmp_path):
    """And with a coefficient of the KL that moves."""
    _, host, metrics = check_kills(tmp_path, steps=12, seed=3, count=4, kind="partial")
    assert sum(record["training/partial/carried_samples"] > 0 for record in metrics) > 6
    assert host["kl_coef"] != 0.1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_with_groups_carried_over(tmp_path):
    _, _, metrics = check_kills(tmp_path, steps=12, seed=4, count=4, kind="carried")
    assert sum(record["training/filter_groups/carried_samples"] > 0 for record in metrics) > 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_with_prompts_that_rest(tmp_path):
    _, host, metrics = check_kills(tmp_path, steps=12, seed=7, count=4, kind="curriculum")
    assert sum(record["training/curriculum/passed_prompts"] > 0 for record in metrics) > 2
    assert host["data"]["curriculum"]["alike"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_with_a_critic(tmp_path):
    _, _, metrics = check_kills(tmp_path, steps=12, seed=5, count=4, kind="critic")
    assert all(record["critic/grad_norm"] > 0 for record in metrics)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_with_a_best_step(tmp_path):
    kept, host, metrics = check_kills(tmp_path, steps=12, seed=6, count=4, kind="best")
    best = max(metrics, key=lambda record: (record["critic/score/mean"], -record["step"]))
    assert host["best"]["step"] == best["step"]
    assert kept == sorted({best["step"], 12})
