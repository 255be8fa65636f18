"""Updates that are skipped because their gradient is not finite: counted, and in the end kept for a replay."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.training.state import TrainState
from jaxrl_post.types import RoutedBatch, TrainBatch
from sharding.placement import named_leaves
from sharding.processes import fetch, from_first, is_first

RECIPE, BATCH, FACTS, WEIGHTS = "config.yaml", "batch.npz", "fault.json", "checkpoints"


class NumericFaultError(ValueError):
    """Too many updates in a row had no finite gradient."""


class Skips:
    """Counts the updates in a row that were skipped."""

    def __init__(self, config: Config | OfflineConfig) -> None:
        self._config, self._in_a_row = config, 0

    def note(self, skipped: bool, state: TrainState, batch: Any, n_micro: int) -> None:
        """After an update to `state` from a packed `batch` [on the devices].

        Raises: NumericFaultError at the last one that `training.max_skipped_updates` allows, once it lies in
        RUN_DIR/faults/update_N.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        limit = self._config.training.max_skipped_updates
        if limit is None or self._in_a_row < limit:
            return
        folder = Path(self._config.run_dir) / "faults" / f"update_{int(fetch(state.step)):06d}"
        _write(folder, self._config, state, batch, n_micro)
        look = f": python -m launch {folder / RECIPE} --replay {folder}" if isinstance(self._config, Config) else ""
        raise NumericFaultError(
            f"training.max_skipped_updates={limit}: so many updates in a row had a gradient that is not finite, and "
            f"were skipped. The last one's batch and weights are kept in {folder}{look}"
        )


class Fault(NamedTuple):
    """What an update was given: a state, and host arrays of a batch whose first `n_micro` micro-batches count."""

    state: TrainState
    batch: TrainBatch | RoutedBatch
    n_micro: int


def _write(folder: Path, config: Config | OfflineConfig, state: TrainState, batch: Any, n_micro: int) -> None:
    """A skipped update has changed nothing in the state but its counter."""
    arrays = dict(named_leaves(fetch(batch)))
    if is_first():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / RECIPE).write_text(recipes.dump(config), encoding="utf-8")
        (folder / FACTS).write_text(json.dumps({"n_micro": int(n_micro)}), encoding="utf-8")
        np.savez(folder / BATCH, **arrays)
    from_first(lambda: None)  # the others go on when the folder is there
    with contextlib.closing(Checkpointer(folder / WEIGHTS, keep_last=1)) as checkpoints:
        checkpoints.save(0, state._replace(step=state.step - 1)._asdict(), {})


def read_fault(folder: Path, abstract: TrainState) -> Fault:
    """The state on the shardings of `abstract`.

    Raises: ValueError for a folder that holds no such update, or one of a recipe with teachers.
    """
    if not (folder / FACTS).is_file():
        raise ValueError(f"--replay {folder}: no {FACTS} in it; give a folder RUN_DIR/faults/update_N")
    with np.load(folder / BATCH, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if any(name.startswith("view/") for name in arrays):
        raise ValueError(f"--replay {folder}: an update of algorithm.kind=distillation cannot be replayed yet")
    fields = {name: arrays[name if name in arrays else f"rows/{name}"] for name in TrainBatch._fields}
    rows = TrainBatch(**fields)
    batch = RoutedBatch(rows, arrays["choices"]) if "choices" in arrays else rows
    with contextlib.closing(Checkpointer(folder / WEIGHTS, keep_last=1)) as checkpoints:
        state, _ = checkpoints.restore(0, abstract._asdict())
    return Fault(TrainState(**state), batch, json.loads((folder / FACTS).read_text(encoding="utf-8"))["n_micro"])
