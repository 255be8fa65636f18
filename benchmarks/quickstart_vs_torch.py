"""Seconds a GRPO step takes here and in plain torch: the quickstart's settings on one machine, one run after the other.

    python benchmarks/quickstart_vs_torch.py [--steps 12] [--out DIR]

Both run as their own process: `python -m launch configs/quickstart.yaml` and `benchmarks/torch_grpo.py`. A step is
sample + reward + update; evaluations and checkpoints, which the torch script has not, are left out of ours. The first
two steps of each are warm-up. A step costs less as fewer groups keep signal, and the two learn at their own pace, so
the table also gives the first timed steps alone, in which nearly every group has some. Prints a table and the ratio,
and writes DIR/{steps.jsonl, curve.png}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxrl_post.models.zoo import resolve
from jaxrl_post.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent
WARM_UP, EARLY = 2, 5
ASIDE = ("timing_s/testing", "timing_s/save_checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of each, the warm-up included")
    parser.add_argument("--out", type=Path, help="where to write steps.jsonl and curve.png")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="quickstart_vs_torch_"))
    out.mkdir(parents=True, exist_ok=True)
    runs = {"jaxrl_post": ours(options.steps, out), "torch": torch_steps(options.steps)}
    with open(out / "steps.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"who": who} | row) + "\n" for who, rows in runs.items() for row in rows)
    draw(runs, out / "curve.png")
    print(table(runs), f"\nwritten: {out}", sep="\n")


def ours(steps: int, out: Path) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(dir=out) as run_dir:
        overrides = [f"run_dir={run_dir}", f"steps={steps}", "evaluation.enabled=false"]
        subprocess.run([sys.executable, "-m", "launch", "configs/quickstart.yaml", *overrides], cwd=ROOT, check=True)
        records = read_metrics(Path(run_dir) / "metrics.jsonl")
    return [
        {
            "step": r["step"],
            "seconds": r["timing_s/step"] - sum(r.get(name, 0.0) for name in ASIDE),
            "reward": r["critic/rewards/mean"],
        }
        for r in records
    ]


def torch_steps(steps: int) -> list[dict[str, float]]:
    command = [sys.executable, str(ROOT / "benchmarks/torch_grpo.py"), str(resolve("smollm2-135m")), str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        rows = []
        for line in process.stdout:
            rows.append(json.loads(line))
            print(f"torch step {rows[-1]['step']}/{steps}  {rows[-1]['seconds']:.2f} s", flush=True)
    if process.returncode:
        raise SystemExit(f"the torch script ended with {process.returncode}")
    return rows


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    timed = {who: [row["seconds"] for row in rows[WARM_UP:]] for who, rows in runs.items()}
    lines = [f"{'seconds a step':24}{'jaxrl_post':>12}{'torch':>12}{'torch / ours':>14}"]
    for name, measure in {
        "mean": statistics.mean,
        "median": statistics.median,
        f"mean of the first {EARLY}": lambda x: statistics.mean(x[:EARLY]),
    }.items():
        a, b = (measure(timed[who]) for who in ("jaxrl_post", "torch"))
        lines.append(f"{name:24}{a:12.2f}{b:12.2f}{b / a:14.2f}")
    return "\n".join(lines)


def draw(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Reward against the time spent in steps."""
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for who, rows in runs.items():
        elapsed, total = [], 0.0
        for row in rows:
            total += row["seconds"]
            elapsed.append(total)
        axes.plot(elapsed, [row["reward"] for row in rows], marker="o", markersize=3, label=who)
    axes.set_xlabel("seconds in steps (compilation included)")
    axes.set_ylabel("mean training reward")
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))


if __name__ == "__main__":
    main()
