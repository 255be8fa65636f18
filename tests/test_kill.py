"""Runs killed by SIGKILL in any phase and started again are the runs that were never stopped, bit for bit."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import numbers, rollouts

from jaxrl_post.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent


def check_kills(folder, steps, seed, count):
    """Kills, goes on, compares. Returns how many of the moments were reached."""
    command = [sys.executable, "tests/killed_runs.py", str(folder), *map(str, (steps, seed, count))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = [line for line in done.stdout.splitlines() if " in " in line or "to the end" in line]
    told = [line for line in told if line.split()[0].isdecimal()]
    print("\n".join(told))
    assert done.returncode == 0, done.stderr[-3000:]
    *killed, end = [int(line.split()[0]) for line in told]
    assert (len(killed), end) == (count, 0), done.stderr[-3000:]
    assert set(killed) <= {signal.SIGKILL, 0}, done.stderr[-3000:]
    straight, again = (read_metrics(folder / name / "metrics.jsonl") for name in ("straight", "killed"))
    assert [record["step"] for record in straight] == list(range(1, steps + 1))
    assert [numbers(record) for record in again] == [numbers(record) for record in straight]
    for step in range(1, steps + 1):
        assert rollouts(folder / "killed", step) == rollouts(folder / "straight", step)
    return killed.count(signal.SIGKILL)


@pytest.mark.slow
def test_killed_twice(tmp_path):
    assert check_kills(tmp_path, steps=6, seed=2, count=2) == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_twenty_random_moments(tmp_path):
    assert check_kills(tmp_path, steps=44, seed=1, count=20) == 20
