"""Updates that are skipped because their loss or gradient is not finite: counted, and in the end kept for a replay."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.training.state import TrainState
from sharding.placement import Tree, named_leaves, place
from sharding.processes import fetch, from_first, is_first

RECIPE, BATCH, FACTS, WEIGHTS = "config.yaml", "batch.npz", "fault.json", "checkpoints"
Of = Literal["policy", "critic"]
FOLDERS: dict[Of, str] = {"policy": "update", "critic": "critic_update"}


class NumericFaultError(ValueError):
    """Too many updates in a row had no finite loss and gradient."""


class Skips:
    """Counts the updates in a row that were skipped."""

    def __init__(self, config: Config | OfflineConfig, of: Of = "policy") -> None:
        self._config, self._of, self._in_a_row = config, of, 0

    def note(
        self, skipped: bool, state: TrainState, batch: Any, n_micro: int, constant: float | None = None, held: Tree = ()
    ) -> None:
        """After an update to `state` from a packed `batch` [on the devices]; `constant` and `held` are the number and
        the parameters that it read beside them.

        Raises: NumericFaultError at the last one that `training.max_skipped_updates` allows, once it lies in
        RUN_DIR/faults/update_N, or critic_update_N.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        limit = self._config.training.max_skipped_updates
        if limit is None or self._in_a_row < limit:
            return
        folder = Path(self._config.run_dir) / "faults" / f"{FOLDERS[self._of]}_{int(fetch(state.step)):06d}"
        facts = {"of": self._of, "n_micro": int(n_micro), "constant": constant}
        _write(folder, self._config, facts, batch, _arrays(state._replace(step=state.step - 1), held))
        raise NumericFaultError(
            f"training.max_skipped_updates={limit}: so many updates of the {self._of} in a row had a loss or gradient "
            f"that is not finite, and were skipped. The last one's batch and weights are kept in {folder}: "
            f"python -m launch {folder / RECIPE} --replay {folder}"
        )


class Fault(NamedTuple):
    """What an update was given, on the devices: a state, a batch whose first `n_micro` micro-batches count, and the
    number and parameters that it read beside them."""

    state: TrainState
    batch: Any
    n_micro: int
    constant: float | None
    held: Tree


def _arrays(state: TrainState, held: Tree) -> Tree:
    """Of a checkpoint. A skipped update has changed nothing in the state but its counter."""
    return state._asdict() | ({"held": held} if jax.tree.leaves(held) else {})


def _write(folder: Path, config: Config | OfflineConfig, facts: dict[str, Any], batch: Any, arrays: Tree) -> None:
    fields = dict(named_leaves(fetch(batch)))
    if is_first():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / RECIPE).write_text(recipes.dump(config), encoding="utf-8")
        (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        np.savez(folder / BATCH, **fields)
    from_first(lambda: None)  # the others go on when the folder is there
    with contextlib.closing(Checkpointer(folder / WEIGHTS, keep_last=1)) as checkpoints:
        checkpoints.save(0, arrays, {})


def fault_of(folder: Path) -> Of:
    """Whose update a folder keeps. Raises: ValueError for one that keeps none."""
    if not (folder / FACTS).is_file():
        raise ValueError(f"--replay {folder}: no {FACTS} in it; give a folder RUN_DIR/faults/update_N")
    of: Of = json.loads((folder / FACTS).read_text(encoding="utf-8"))["of"]
    return of


def read_fault(
    folder: Path, abstract: TrainState, batch_shardings: Tree, rows: tuple[int, ...], held: Tree = ()
) -> Fault:
    """An update that `Skips` has kept.

    Args:
      abstract, held: shapes and shardings of the state and of the parameters beside it.
      batch_shardings: of the batches that this recipe makes.
      rows: micro-batches, rows and tokens of these.

    Raises: ValueError where this recipe and mesh pack their rows in another shape.
    """
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    with np.load(folder / BATCH, allow_pickle=False) as file:
        fields = {name: file[name] for name in file.files}
    names = [name for name, _ in named_leaves(batch_shardings)]
    shape = next(fields[name].shape for name in ("tokens", "rows/tokens") if name in fields)
    if shape != rows or set(names) != set(fields):
        raise ValueError(
            f"the update to replay has rows of shape {shape} (micro-batches, rows, tokens), and this recipe on this "
            f"mesh makes {rows}: use the recipe in its folder, on as many devices"
        )
    batch = jax.tree.unflatten(jax.tree.structure(batch_shardings), [fields[name] for name in names])
    with contextlib.closing(Checkpointer(folder / WEIGHTS, keep_last=1)) as checkpoints:
        arrays, _ = checkpoints.restore(0, _arrays(abstract, held))
    held = arrays.pop("held", ())
    return Fault(TrainState(**arrays), place(batch, batch_shardings), facts["n_micro"], facts["constant"], held)
