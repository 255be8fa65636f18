"""What tests read from the folder of a run, and of an update that it kept."""

import json
from pathlib import Path

from launch.__main__ import main

TIMED = ("timing_s/", "perf/", "compile/")


def rollouts(run_dir, step):
    path = Path(run_dir) / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers(record):
    """What must not depend on the machine's speed."""
    return {k: v for k, v in record.items() if not k.startswith(TIMED)}


def replayed_norms(kept, capsys):
    """A replay of an update whose numbers are finite: the gradient's norm as it sees it, and as the update has it."""
    assert main([str(kept / "config.yaml"), "--replay", str(kept)]) == 0
    said = capsys.readouterr().out
    [line] = [line for line in said.splitlines() if line.startswith("gradient norm")]
    here, there = (float(word) for word in line.split() if word[0].isdigit())
    assert here > 0
    assert "first place that is not finite: none" in said
    assert said.endswith("the update was made\n")
    return here, there
