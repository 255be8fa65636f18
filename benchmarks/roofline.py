"""How near sampling and updating come to the products with the weights alone, and to transformers and torch.

    python benchmarks/roofline.py {smollm2-135m|workload} [--timed 3] [--new 64] [--torch PYTHON] [--batch 16]

The main job samples and learns on full-length answers (nobody stops, every group has signal) in a process of its own;
before and after it this process times the same products by `jnp.dot` (see `products.py`) and keeps the better time.
`share` is that limit over the phase's median time. `--torch` names a Python with torch and transformers, which then do
the same: the same prompts, as many tokens, an update on all samples in micro-batches of `--batch`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from peers import run_peer
from products import forward_s, update_s
from workload import GROUP, PROMPTS, write_workload

from jaxrl_post.loops.packed import attention_length
from jaxrl_post.models.huggingface import read_config
from jaxrl_post.models.zoo import resolve
from jaxrl_post.training.packing import pack_shape
from launch.huge_pages import restart_with_huge_pages
from launch.no_devices import skip_absent_devices

HERE = Path(__file__).parent
SMALL_PROMPTS, SMALL_GROUP = 8, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("smollm2-135m", "workload"))
    parser.add_argument("--timed", type=int, default=3, help="timed steps, after two to warm up")
    parser.add_argument("--new", type=int, default=64, help="tokens of each sample")
    parser.add_argument("--tokens", type=int, default=1024, help="our training.tokens_per_microbatch")
    parser.add_argument("--torch", metavar="PYTHON", help="also run torch and transformers with this Python")
    parser.add_argument("--batch", type=int, default=16, help="sequences of torch's micro-batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prompts, group = write_prompts(folder, options.model)
        config = read_config((folder / "model").resolve())
        rows, width = prompts * group, 32
        shape = pack_shape(
            max_prompt=width, max_new_tokens=options.new, samples_per_prompt=group, prompts=prompts,
            tokens_per_microbatch=options.tokens, attention_length=attention_length(config),
        )  # fmt: skip
        positions = shape.rows * shape.length
        decode_s = lambda: options.new * forward_s(config, rows, rows) + forward_s(config, prompts * width, 0)
        limits_s = lambda: (decode_s(), update_s(config, positions, positions))
        before = limits_s()
        phases = run_ours(folder, group, width, options)
        decode, update = map(min, before, limits_s())
        theirs = None
        if options.torch:
            theirs = run_peer(
                options.torch, "peer_torch.py", folder, f"--timed={options.timed}", f"--group={group}",
                f"--new={options.new}", f"--batch={options.batch}",
            )  # fmt: skip
    for phase, limit in {"gen_s": decode, "update_s": phases["micro_batches"] * update}.items():
        line = {"model": options.model, "phase": phase.removesuffix("_s"), "ours_s": phases[phase]}
        line |= {"products_s": round(limit, 3), "share": round(limit / phases[phase], 3)}
        if theirs:
            line |= {"torch_s": theirs[phase], "torch / ours": round(theirs[phase] / phases[phase], 2)}
        print(json.dumps(line))


def write_prompts(folder: Path, model: str) -> tuple[int, int]:
    """A folder `model` and prompts.jsonl. Returns: prompts, and samples of each."""
    if model == "workload":
        write_workload(folder, "fixed")
        return PROMPTS, GROUP
    (folder / "model").symlink_to(resolve(model))
    texts = [f"Question {i}: what is {i} plus {2 * i + 1}, and why is that so?" for i in range(1, SMALL_PROMPTS + 1)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return SMALL_PROMPTS, SMALL_GROUP


def alternate(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """Signal for every group."""
    return [float(i % 2) for i in range(len(completions))]


def run_ours(folder: Path, group: int, width: int, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of the phases, and micro-batches of an update."""
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    recipe = {
        "run_dir": str(folder / "run"),
        "steps": 3 + options.timed,  # the last also saves
        "model": {"path": str((folder / "model").resolve())},
        "optimizer": {"learning_rate": 1e-5, "weight_decay": 0.0},
        "training": {"tokens_per_microbatch": options.tokens},
        "evaluation": {"enabled": False},
        "data": {
            "task": {"kind": "jsonl", "path": str(folder / "prompts.jsonl")}, "prompts_per_step": len(lines),
            "max_prompt_tokens": width, "chat": False,
        },
        "reward": {"kind": "function", "function": "roofline:alternate", "workers": 0, "per": "step"},
        "rollout": {"samples_per_prompt": group, "max_new_tokens": options.new, "min_tokens": options.new - 1},
        "algorithm": {"kind": "grpo", "old_logprobs": "trainer"},  # without a stop the draw is not quite the policy's
        "dump_rollouts": False,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    command = [sys.executable, "-m", "launch", str(folder / "recipe.yaml")]
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"PYTHONPATH": paths})
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    timed = [row for row in metrics if 2 < row["step"] <= 2 + options.timed]
    median = lambda name: statistics.median(row[name] for row in timed)
    return {
        "gen_s": round(median("timing_s/gen"), 3),
        "update_s": round(median("timing_s/update_actor"), 3),
        "micro_batches": median("training/micro_batches"),
    }


if __name__ == "__main__":
    skip_absent_devices()
    restart_with_huge_pages()  # as the main job does: products are faster in them
    main()
