"""Seconds of a whole training step on the small, fixed workload of `workload.py`, ours and peers' in one go.

    python benchmarks/train_step.py {grpo|dpo} {fixed|ragged} [--timed 3] [--trl PYTHON] [--tunix PYTHON] [--batch 64]

`grpo`: 32 prompts × 8 samples of at most 96 tokens, sampled, graded and learned from in one update. `dpo`: one update
on 32 pairs of 32 + 96 tokens, the reference scored on the fly. Float32, AdamW, no warm-up of the learning rate.
`--trl` names a Python that has TRL and torch, `--tunix` one that has google-tunix; the same model folder and the same
prompts are given to all, each in a process of its own, one step to warm up, and the ratio of the median steps is
printed (above 1: ours is faster).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path

import yaml
from peers import run_peer
from quickstart_vs_torch import timed
from workload import GROUP, LONGEST, MAX_NEW, PAIR_ANSWER, PAIR_PROMPT, PAIRS, PROMPTS, STOP_BIAS, write_workload

HERE = Path(__file__).parent
OPTIMIZER = {"learning_rate": 1e-5, "weight_decay": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("grpo", "dpo"))
    parser.add_argument("workload", choices=STOP_BIAS)
    parser.add_argument("--timed", type=int, default=3, help="timed steps, after one to warm up")
    parser.add_argument("--tokens", type=int, default=2048, help="our training.tokens_per_microbatch")
    parser.add_argument("--trl", metavar="PYTHON", help="also run TRL with this Python")
    parser.add_argument("--tunix", metavar="PYTHON", help="also run Tunix with this Python")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a peer's micro-batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_workload(folder, options.workload)
        ours = run_ours(folder, options)
        arguments = (options.method, folder, f"--timed={options.timed}", f"--batch={options.batch}")
        pythons = {"peer_trl.py": options.trl, "peer_tunix.py": options.tunix}
        peers = [run_peer(python, script, *arguments) for script, python in pythons.items() if python]
    for result in (ours, *peers):
        print(json.dumps({"method": options.method, "workload": options.workload} | result))
    for theirs in peers:
        print(f"{theirs['system']} / ours: {theirs['step_s'] / ours['step_s']:.2f}× in wall time, "
              f"{theirs['cpu_s'] / ours['cpu_s']:.2f}× in CPU time")  # fmt: skip


def even_share(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """The share of even words; 0.5 for no words, so that nothing rewards another length."""
    even = [[int(word[1:]) % 2 == 0 for word in completion.split()] for completion in completions]
    return [sum(words) / len(words) if words else 0.5 for words in even]


def run_ours(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """The main job in a process of its own, so that memory and CPU time are its alone."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(_recipe(folder, options)))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
    steps = timed(
        [sys.executable, "-m", "launch", str(recipe)], re.compile(r"^step +(\d+)/.*?(?:reward|loss) (\S+)"), sys.stderr
    )
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if 1 < row["step"] <= 1 + options.timed]
    phases = [name for name in rows[0] if name.startswith("timing_s/") and name != "timing_s/step"]
    median = lambda values: round(statistics.median(values), 3)
    return {
        "system": "jaxrl_post",
        "step_s": median(step["seconds"] for step in steps[1 : 1 + options.timed]),
        "cpu_s": median(step["cpu"] for step in steps[1 : 1 + options.timed]),
        "phases_s": {name.removeprefix("timing_s/"): median(row[name] for row in rows) for name in phases},
        "peak_rss_mb": round(max(row["perf/cpu_memory_used_gb"] for row in rows) * 1024),
    }


def _recipe(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    common = {
        "run_dir": str(folder / "run"),
        "steps": 2 + options.timed,  # the last step also saves
        "model": {"path": str(folder / "model")},
        "optimizer": OPTIMIZER,
        "training": {"tokens_per_microbatch": options.tokens},
        "evaluation": {"enabled": False},
    }
    if options.method == "dpo":
        data = {"path": str(folder / "pairs.jsonl"), "examples_per_step": PAIRS, "chat": False}
        return common | {
            "data": data | {"max_tokens": PAIR_PROMPT + PAIR_ANSWER}, "algorithm": {"kind": "dpo", "beta": 0.1},
        }  # fmt: skip
    task = {"kind": "jsonl", "path": str(folder / "prompts.jsonl")}
    return common | {
        "data": {"task": task, "prompts_per_step": PROMPTS, "max_prompt_tokens": LONGEST, "chat": False},
        "reward": {"kind": "function", "function": "train_step:even_share", "workers": 0},
        "rollout": {"samples_per_prompt": GROUP, "max_new_tokens": MAX_NEW},
        "dump_rollouts": False,
    }


if __name__ == "__main__":
    main()
