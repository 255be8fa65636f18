"""A run's curves as one picture, from its metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxrl_post.observe.metrics import read_metrics

REWARD = "critic/rewards/mean"
PANELS = {
    "response_length/mean": "response length (tokens)",
    "actor/entropy": "entropy (nats)",
    "actor/grad_norm": "gradient norm",
    "timing_s/step": "step time (s)",
}
INK, MUTED, ACCENT, HELD_OUT = "#24292f", "#8c959f", "#0969da", "#bc4c00"


def plot_curves(metrics_path: str | Path, png_path: str | Path) -> None:
    """Draw mean training reward, its 3-step mean and held-out accuracy, with length, entropy, norm and time below.

    Raises FileNotFoundError without the file and ValueError when no step in it has a reward.
    """
    if not Path(metrics_path).exists():
        raise FileNotFoundError(f"no metrics at {metrics_path}")
    records = read_metrics(metrics_path)
    if not len(series(records, REWARD)[0]):
        raise ValueError(f"{metrics_path} has no step with {REWARD}: nothing to draw")
    figure = _draw(records)
    FigureCanvasAgg(figure).print_png(str(png_path))


def series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have `name`; null (a value that was not finite) becomes NaN, a gap."""
    points = [(record["step"], record[name]) for record in records if name in record]
    steps = np.array([step for step, _ in points], dtype=np.int64)
    return steps, np.array([np.nan if value is None else value for _, value in points], dtype=np.float64)


def trailing_mean(values: np.ndarray, width: int = 3) -> np.ndarray:
    """Mean of each value and up to `width` - 1 before it, leaving NaNs out; NaN where all are NaN."""
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    finite = [window[np.isfinite(window)] for window in windows]
    return np.array([window.mean() if window.size else np.nan for window in finite])


def _draw(records: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 5.6), dpi=150, layout="constrained")
    grid = figure.add_gridspec(2, len(PANELS), height_ratios=[2.2, 1])
    _reward_panel(figure.add_subplot(grid[0, :]), records)
    for column, (name, title) in enumerate(PANELS.items()):
        axes = figure.add_subplot(grid[1, column])
        axes.plot(*series(records, name), color=ACCENT, linewidth=1.3)
        _dress(axes, title)
    return figure


def _reward_panel(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    steps, rewards = series(records, REWARD)
    axes.plot(steps, rewards, "o", color=ACCENT, alpha=0.35, markersize=4, label="training reward, each step")
    axes.plot(steps, trailing_mean(rewards), color=ACCENT, linewidth=2.2, label="training reward, 3-step mean")
    for name in sorted({name for record in records for name in record if name.startswith("val-core/")}):
        _held_out(axes, name, *series(records, name))
    _dress(axes, "reward")
    axes.set_xlabel("step", color=INK)
    axes.margins(x=0.04, y=0.12)
    axes.legend(frameon=False, loc="lower right", fontsize=9, labelcolor=INK)


def _held_out(axes: Axes, name: str, steps: np.ndarray, values: np.ndarray) -> None:
    label = f"held-out {name.removeprefix('val-core/')}"
    axes.plot(steps, values, "D--", color=HELD_OUT, markersize=6, linewidth=1, dashes=(3, 3), label=label)
    for at in dict.fromkeys((0, len(steps) - 1)):
        text = f"{values[at]:.3f}"
        axes.annotate(text, (steps[at], values[at]), (0, 8), textcoords="offset points", ha="center", color=HELD_OUT)


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.tick_params(colors=MUTED, labelsize=8)
    axes.grid(axis="y", color=MUTED, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
