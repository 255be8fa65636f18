"""A run's curves as one picture, from its metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxrl_post.observe.metrics import read_metrics


class Panel(NamedTuple):
    """A metric of every step, with the held-out ones whose names start with `held_out`."""

    metric: str
    title: str
    held_out: str


class Picture(NamedTuple):
    """What to draw: large panels side by side, and below them small ones (metric: title); those without data are left
    out."""

    large: tuple[Panel, ...]
    small: dict[str, str]


ONLINE = Picture(
    (Panel("critic/rewards/mean", "reward", "val-core/"),),
    {
        "response_length/mean": "response length (tokens)",
        "actor/entropy": "entropy (nats)",
        "actor/grad_norm": "gradient norm",
        "timing_s/step": "step time (s)",
    },
)
OFFLINE = Picture(
    (
        Panel("loss", "loss", "val-core/loss"),
        Panel("rewards/accuracies", "accuracy", "val-core/accuracy"),
        Panel("accuracy", "accuracy", "val-core/accuracy"),
    ),
    {
        "rewards/margins": "reward margin",
        "margin": "score margin",
        "entropy": "entropy (nats)",
        "actor/grad_norm": "gradient norm",
        "actor/lr": "learning rate",
        "timing_s/step": "step time (s)",
    },
)
INK, MUTED, ACCENT, HELD_OUT = "#24292f", "#8c959f", "#0969da", "#bc4c00"


def plot_curves(metrics_path: str | Path, png_path: str | Path, picture: Picture = ONLINE) -> None:
    """Draw a run: each large panel's metric, its 3-step mean and what is held out; the small panels below.

    Raises FileNotFoundError without the file and ValueError when no step in it has the first panel's metric.
    """
    if not Path(metrics_path).exists():
        raise FileNotFoundError(f"no metrics at {metrics_path}")
    records = read_metrics(metrics_path)
    first = picture.large[0].metric
    if not len(series(records, first)[0]):
        raise ValueError(f"{metrics_path} has no step with {first}: nothing to draw")
    figure = _draw(records, picture)
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


def _draw(records: Sequence[Mapping[str, Any]], picture: Picture) -> Figure:
    known = {name for record in records for name in record}
    large = [panel for panel in picture.large if panel.metric in known]
    small = {name: title for name, title in picture.small.items() if name in known}
    figure = Figure(figsize=(10, 5.6), dpi=150, layout="constrained")
    wide, narrow = max(len(small), 1), len(large)  # columns of the grid that a large and a small panel take
    grid = figure.add_gridspec(2, wide * narrow, height_ratios=[2.2, 1])
    for i, panel in enumerate(large):
        _large_panel(figure.add_subplot(grid[0, i * wide : (i + 1) * wide]), records, panel)
    for i, (name, title) in enumerate(small.items()):
        axes = figure.add_subplot(grid[1, i * narrow : (i + 1) * narrow])
        axes.plot(*series(records, name), color=ACCENT, linewidth=1.3)
        _dress(axes, title)
    return figure


def _large_panel(axes: Axes, records: Sequence[Mapping[str, Any]], panel: Panel) -> None:
    steps, values = series(records, panel.metric)
    label = f"training {panel.title}"
    axes.plot(steps, values, "o", color=ACCENT, alpha=0.35, markersize=4, label=f"{label}, each step")
    axes.plot(steps, trailing_mean(values), color=ACCENT, linewidth=2.2, label=f"{label}, 3-step mean")
    for name in sorted({name for record in records for name in record if name.startswith(panel.held_out)}):
        _held_out(axes, name, *series(records, name))
    _dress(axes, panel.title)
    axes.set_xlabel("step", color=INK)
    axes.margins(x=0.04, y=0.12)
    axes.legend(frameon=False, loc="best", fontsize=9, labelcolor=INK)


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
