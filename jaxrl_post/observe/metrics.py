"""What a run writes down: metrics.jsonl, one JSON object a step, and rollouts/step_000001.jsonl, one a sample.

Both are strict JSON. JSON has no NaN or infinity, so such a value is written as null and named, with what it was, under
`nonfinite`: {"step": 3, "actor/grad_norm": null, "nonfinite": {"actor/grad_norm": "nan"}}.
Metric names are those of verl (`critic/rewards/mean`, `timing_s/gen`, `val-core/…`).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import numbers
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts"
log = logging.getLogger(__name__)


def rollout_file(run_dir: str | Path, step: int) -> Path:
    """Where the samples of a step lie."""
    return Path(run_dir) / ROLLOUTS / f"step_{step:06d}.jsonl"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, oldest first. A line torn by a killed process is left out."""
    return [record for line in _lines(Path(path)) if (record := _parse(line)) is not None]


class MetricsWriter:
    """Appends to the files of one run folder, which it makes.

    A resumed run gives `resume_step`, the last step its checkpoint holds: what was written after it is dropped, so the
    files read as those of a run that never stopped. A new run (None) in a used folder moves the earlier run's files to
    `previous_1/`, `previous_2/`, …. Every step is flushed as it is written.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            _set_aside(self.run_dir)
        else:
            _drop_after(self.run_dir, resume_step)
        records = read_metrics(self.run_dir / METRICS)
        self._last = records[-1]["step"] if records else -1
        self._file = open(self.run_dir / METRICS, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one step's numbers (Python, numpy or on a device; scalars).

        Raises ValueError when `step` is not after the last one written.
        """
        if step <= self._last:
            raise ValueError(f"metrics of step {step} come after those of step {self._last}: steps only grow")
        self._file.write(json.dumps(_record(step, metrics), allow_nan=False) + "\n")
        self._file.flush()
        self._last = step

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write a step's samples, one JSON object each (text, numbers, lists), as one file that appears whole."""
        path = rollout_file(self.run_dir, step)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, (json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows))
        return path

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class NoWriter:
    """In the place of a `MetricsWriter` on processes that write nothing."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        pass


def _record(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: _number(value) for name, value in metrics.items()}
    nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    record = {"step": step} | {name: None if name in nonfinite else value for name, value in values.items()}
    return record | ({"nonfinite": nonfinite} if nonfinite else {})


def _number(value: Any) -> int | float:
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _plain(value: Any) -> Any:
    """`value` as strict JSON: NaN and infinities become text, numpy scalars and arrays become numbers and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(value.tolist())


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _set_aside(run_dir: Path) -> None:
    used = [path for name in (METRICS, ROLLOUTS) if (path := run_dir / name).exists()]
    if used:
        numbers = (f"previous_{number}" for number in itertools.count(1))
        previous = next(path for name in numbers if not (path := run_dir / name).exists())
        log.warning("%s has no checkpoint to go on from: what an earlier run left is now in %s", run_dir, previous.name)
        previous.mkdir()
        for path in used:
            path.rename(previous / path.name)


def _drop_after(run_dir: Path, step: int) -> None:
    kept = [record for record in read_metrics(run_dir / METRICS) if record["step"] <= step]
    write_whole(run_dir / METRICS, (json.dumps(record) + "\n" for record in kept))
    last = rollout_file(run_dir, step).name
    for path in (run_dir / ROLLOUTS).glob("step_*.jsonl"):
        if path.name > last:
            path.unlink()


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Replace a file in one move: whoever looks sees the old one or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
