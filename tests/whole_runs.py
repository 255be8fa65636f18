"""What tests read from the folder of a run."""

import json
from pathlib import Path

TIMED = ("timing_s/", "perf/", "compile/")


def rollouts(run_dir, step):
    path = Path(run_dir) / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers(record):
    """What must not depend on the machine's speed."""
    return {k: v for k, v in record.items() if not k.startswith(TIMED)}
