"""Seconds a GRPO step takes here and in plain torch: the quickstart's settings on one machine, one run after the other.

    python benchmarks/quickstart_vs_torch.py [--steps 12] [--out DIR]

Both run as their own process, `python -m launch configs/quickstart.yaml` and `benchmarks/torch_grpo.py`, and are timed
alike from outside, from one step's line of output to the next: wall clock, and CPU seconds of the process, the figure
that a busy neighbour disturbs least. A step is sample + reward + update; evaluation is off and the last step, in which
ours saves a checkpoint, is left out, as are the first two (warm-up, compiling). A step costs less as fewer groups have
signal, and the two learn at their own pace, so the table also gives the first timed steps alone, in which nearly every
group has some; sampling (`gen`) and the update are as each side times them. Prints a table with the ratios, and writes
DIR/{steps.jsonl, curve.png}.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxrl_post.models.zoo import resolve

ROOT = Path(__file__).parent.parent
WARM_UP, EARLY = 2, 5
PHASE = re.compile(r"(gen|update_actor) (\S+) s")
TICKS = os.sysconf("SC_CLK_TCK")
Step = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of each, the untimed ones included")
    parser.add_argument("--out", type=Path, help="where to write steps.jsonl and curve.png")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="quickstart_vs_torch_"))
    out.mkdir(parents=True, exist_ok=True)
    runs = {"jaxrl_post": ours(options.steps), "torch": torch(options.steps)}
    with open(out / "steps.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"who": who} | step) + "\n" for who, steps in runs.items() for step in steps)
    draw(runs, out / "curve.png")
    print(table(runs), f"\nwritten: {out}", sep="\n")


def ours(steps: int) -> list[Step]:
    with tempfile.TemporaryDirectory() as run_dir:
        overrides = [f"run_dir={run_dir}", f"steps={steps}", "evaluation.enabled=false"]
        command = [sys.executable, "-m", "launch", "configs/quickstart.yaml", *overrides]
        return timed(command, re.compile(r"^step +(\d+)/.*?reward (\S+)"))


def torch(steps: int) -> list[Step]:
    command = [sys.executable, "benchmarks/torch_grpo.py", str(resolve("smollm2-135m")), str(steps)]
    return timed(command, re.compile(r"^step +(\d+) +reward (\S+)"))


def timed(command: list[str], line_of_a_step: re.Pattern[str], echo: TextIO = sys.stdout) -> list[Step]:
    """Runs a command and notes wall clock and CPU seconds between the lines that end its steps."""
    steps: list[Step] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None
        wall, cpu = time.perf_counter(), 0.0
        for line in process.stdout:
            print(line, end="", flush=True, file=echo)
            if match := line_of_a_step.match(line):
                now, used = time.perf_counter(), cpu_seconds(process.pid)
                step = {"step": int(match[1]), "seconds": now - wall, "cpu": used - cpu, "reward": float(match[2])}
                steps.append(step | {name: float(seconds) for name, seconds in PHASE.findall(line)})
                wall, cpu = now, used
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return steps


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def table(runs: dict[str, list[Step]]) -> str:
    lines = [f"{'a step':40}{'jaxrl_post':>12}{'torch':>12}{'torch / ours':>14}"]
    units = {"seconds": "wall s", "cpu": "CPU s", "gen": "sampling, wall s", "update_actor": "update, wall s"}
    for unit, label in units.items():
        timed_steps = {who: [step.get(unit, 0.0) for step in steps[WARM_UP:-1]] for who, steps in runs.items()}
        for name, measure in {
            "mean": statistics.mean,
            "median": statistics.median,
            f"mean of the first {EARLY}": lambda x: statistics.mean(x[:EARLY]),
        }.items():
            a, b = (measure(timed_steps[who]) for who in ("jaxrl_post", "torch"))
            lines.append(f"{f'{label}, {name}':40}{a:12.2f}{b:12.2f}{b / a:14.2f}")
    return "\n".join(lines)


def draw(runs: dict[str, list[Step]], path: Path) -> None:
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
