"""What a person sees while a run goes on: a live table on a terminal, one line a step anywhere else."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BETWEEN = "between phases"
SHOWN = {  # column: metric, format
    "reward": ("critic/rewards/mean", "{:.3f}"),
    "loss": ("loss", "{:.4f}"),
    "accuracy": ("rewards/accuracies", "{:.3f}"),
    "pairs won": ("accuracy", "{:.3f}"),
    "margin": ("rewards/margins", "{:.3f}"),
    "length": ("response_length/mean", "{:.1f}"),
    "entropy": ("actor/entropy", "{:.3f}"),
    "grad norm": ("actor/grad_norm", "{:.3g}"),
    "tokens/s": ("perf/throughput", "{:.0f}"),
    "step s": ("timing_s/step", "{:.2f}"),
}
NOTHING_LEARNED = "no update: each prompt's samples were rewarded alike, or left out"


class Phases:
    """Wall-clock seconds of a step's phases: `with phases("gen"): …`, then `collect()` once a step.

    Names follow verl: gen, reward, old_log_prob, ref, adv, update_actor, testing, save_checkpoint. A phase entered
    twice adds up. Work on a device is asynchronous: wait for the result inside the phase that should be charged for it.
    `entered` is told of each phase as it begins, and of `BETWEEN` when none does.
    """

    def __init__(self, entered: Callable[[str], None] = lambda phase: None) -> None:
        self._entered, self._current, self._broken = entered, BETWEEN, ""
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        around, self._current = self._current, name
        self._entered(name)
        try:
            yield
        except BaseException:
            self._broken = self._broken or name
            raise
        finally:
            self._current = around
            self._entered(around)
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def beside(self, name: str, seconds: float) -> None:
        """So long something else went on during the phases."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def broken(self) -> str:
        """The innermost phase that an exception has ended; empty for none."""
        return self._broken

    def collect(self) -> dict[str, float]:
        """`timing_s/{phase}` of every phase, and `timing_s/step`, all the time since the last call; starts afresh."""
        now = time.perf_counter()
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["timing_s/step"] = now - self._since
        self._seconds, self._since = {}, now
        return metrics


class Progress:
    """Shows each step of a run of `steps` steps. `with Progress(40) as progress: progress.update(1, metrics)`.

    `console` is where to write (default: standard output); `rows` is how many steps the live table keeps in sight.
    """

    def __init__(self, steps: int, console: Console | None = None, rows: int = 12) -> None:
        self.steps = steps
        self.console = console or Console()
        self._recent: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=rows)
        self._seconds: deque[float] = deque(maxlen=20)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show step `step` (from 1) with its metrics, by their verl names; those absent are left out."""
        self._recent.append((step, metrics))
        self._seconds.append(float(metrics.get("timing_s/step", 0.0)))
        if self._live is None:
            self._print(step_line(step, self.steps, metrics, self.eta(step)))
        else:
            self._live.update(self._view(step), refresh=True)

    def note(self, text: str) -> None:
        """A line about something other than a step: an evaluation, a checkpoint, a choice made."""
        self._print(text)

    def eta(self, step: int) -> float:
        """Seconds left: the steps to come at the median pace of the last ones (the first step compiles)."""
        return (self.steps - step) * statistics.median(self._seconds)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _print(self, text: str) -> None:
        # A log file has no width: one step stays one line.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _view(self, step: int) -> Group:
        names = [name for name, (metric, _) in SHOWN.items() if any(metric in m for _, m in self._recent)]
        table = Table("step", *names, "phases", box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for number, metrics in self._recent:
            cells = [_cell(name, metrics) for name in names]
            table.add_row(str(number), *cells, _joined(phase_text(metrics), idle(metrics)))
        bar = Table.grid(padding=(0, 2, 0, 0))
        left = f"{clock(self.eta(step))} left" if step < self.steps else "done"
        bar.add_row(ProgressBar(self.steps, step, width=30), Text(f"{step}/{self.steps}", "bold"), Text(left))
        return Group(table, bar)


def step_line(step: int, steps: int, metrics: Mapping[str, Any], eta: float) -> str:
    """One step as one line of text: `step 3/40  reward 0.312  …  gen 2.9 s, update_actor 3.0 s  3m42s left`."""
    shown = [f"{name} {_cell(name, metrics)}" for name, (metric, _) in SHOWN.items() if metric in metrics]
    of_step = f"step {step:>{len(str(steps))}}/{steps}"
    return _joined(of_step, *shown, phase_text(metrics), f"{clock(eta)} left", idle(metrics))


def idle(metrics: Mapping[str, Any]) -> str:
    """Why a step had nothing to learn from, which no other number there shows; nothing if it had."""
    return NOTHING_LEARNED if metrics.get("training/trained_sequences") == 0 else ""


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def phase_text(metrics: Mapping[str, Any]) -> str:
    """`gen 2.9 s, update_actor 3.0 s, 2 compiles`: phases of at least a hundredth of a second, and programs built."""
    phases = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    texts = [f"{name} {value:.2f} s" for name, value in phases.items() if name != "step" and value >= 0.01]
    compiles = int(metrics.get("compile/count", 0))
    return ", ".join(texts + ([f"{compiles} compile{'s' * (compiles > 1)}"] if compiles else []))


def clock(seconds: float) -> str:
    """`42s`, `3m42s`, `1h03m`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _cell(name: str, metrics: Mapping[str, Any]) -> str:
    metric, form = SHOWN[name]
    return form.format(float(metrics[metric])) if metric in metrics else ""
