"""Checkpoints: the arrays and the host state of one step as a unit, written by Orbax in the background.

A step is written under a temporary name and renamed when all of it is on disk, so a killed save leaves nothing that
counts. On disk the arrays are a flat map from tree path to array: the tree that asks decides structure and placement.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from sharding.placement import named_leaves
from sharding.processes import from_first

Tree = Any
ITEMS = ("arrays", "host")
SHOWN = 8
# Replicas share the writing of an array by slices, each a program to compile: 64 for a tiny model on 8 devices.
SHARED_BYTES = 2**22  # of an array, from which on that is worth it
log = logging.getLogger(__name__)


class SaveError(OSError):
    """A checkpoint could not be written; the ones before it are as they were."""


class _Kept:
    """Which steps stay, in the form Orbax asks for it: the newest few, and one more by number."""

    def __init__(self, last: int):
        self._last = last
        self.also: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        old = len(checkpoints) - self._last
        return [i >= old or checkpoint.step == self.also for i, checkpoint in enumerate(checkpoints)]


class Checkpointer:
    """Saves and restores steps in `folder` (made if absent), of which the newest `keep_last` stay, and one more.

    Only the job that trains may save into a folder; others may read it meanwhile. All processes of a job call every
    method together.
    """

    def __init__(self, folder: str | Path, keep_last: int):
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: keep at least 1 checkpoint")
        self._folder = epath.Path(folder) if "://" in str(folder) else epath.Path(Path(folder).absolute())
        logging.getLogger("absl").addFilter(_worth_showing)
        self._kept = _Kept(keep_last)
        self._saving = -1  # the newest step whose save began
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(preservation_policy=self._kept),
            item_handlers={"arrays": _arrays_handler(), "host": ocp.JsonCheckpointHandler()},
        )

    def save(self, step: int, arrays: Tree, host: dict[str, Any], keep: int | None = None) -> None:
        """Copy `arrays` off the devices, then write them and `host` in the background.

        On return the arrays may be donated. Waits for the save before it and raises what made that one fail; removes
        what killed saves left behind.

        Args:
          step: above every saved step.
          arrays: a tree of non-empty jax arrays (of random keys, their `jax.random.key_data`).
          host: what JSON gives back unchanged: string keys, lists, finite numbers.
          keep: a step that stays although newer ones are saved, until the next save names another.

        Raises: ValueError for anything else, before anything is written; SaveError for the save before this one, and
        where this one cannot begin.
        """
        flat = _flatten(arrays)
        for path, leaf in flat.items():
            _check_savable(path, leaf)
        if not isinstance(host, dict):
            raise ValueError(f"host={host!r}: expected a dict")
        _check_json(host, "host")
        self.wait()
        newest = max(self._steps(), default=-1)
        if step <= newest or step < 0:
            raise ValueError(f"step={step}: must be above the newest saved step, {newest}, in {self._folder}")
        self._saving, self._kept.also = step, keep
        args = ocp.args.Composite(arrays=ocp.args.PyTreeSave(flat), host=ocp.args.JsonSave(host))
        with self._failure_told():
            self._remove_unfinished()
            self._manager.save(step, args=args, force=True)

    def latest(self) -> int | None:
        """The newest step that is complete on disk, as the first process sees it; None when there is none."""
        for path in self._unfinished():
            log.warning("ignoring %s: its save has not finished", path)
        return from_first(lambda: max(self._steps(), default=None))

    def steps(self) -> list[int]:
        """All that are complete on disk, the oldest first."""
        return sorted(self._steps())

    def restore(self, step: int, abstract: Tree, partial: bool = False) -> tuple[Tree, dict[str, Any]]:
        """Arrays in the structure and on the shardings of `abstract`, bit for bit as saved, and the host state.

        Args:
          abstract: tree of `jax.ShapeDtypeStruct`, each with a sharding, on any devices.
          partial: top-level keys of the saved tree may be left out (parameters without the optimizer).

        Raises: ValueError for a step that is not there, and, naming the tree path, for an array that only one side has
        and for another shape or dtype.
        """
        self._check_exists(step)
        wanted = _flatten(abstract)
        placed = {path: _restore_args(path, leaf) for path, leaf in wanted.items()}
        with self._damage_named(step):
            saved = self._manager.item_metadata(step)["arrays"].tree
        _check_same(wanted, saved, partial)
        # Orbax's partial_restore reads no more than what is wanted; what may be left out was checked above.
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=placed, partial_restore=True)
        with self._damage_named(step):
            flat = self._manager.restore(step, args=ocp.args.Composite(arrays=args))["arrays"]
        arrays = jax.tree.unflatten(jax.tree.structure(abstract), [flat[path] for path in wanted])
        return arrays, self.restore_host(step)

    def restore_host(self, step: int) -> dict[str, Any]:
        """The host state alone. Raises: ValueError for a step that is not there."""
        self._check_exists(step)
        with self._damage_named(step):
            return self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]

    def wait(self) -> None:
        """Return when the save in flight is complete on disk. Raises: SaveError, from what made it fail."""
        with self._failure_told():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, then end the background threads. Raises: as `wait`."""
        with self._failure_told():
            self._manager.close()

    def _steps(self) -> list[int]:
        return [int(path.name) for path in self._folder.iterdir() if _is_complete(path)]

    def _unfinished(self) -> list[epath.Path]:
        """Steps being written, by this job or by one that was killed."""
        suffix = ocp.path.atomicity.TMP_DIR_SUFFIX
        steps = [path for path in self._folder.iterdir() if path.name.partition(suffix)[0].isdecimal()]
        return [path for path in steps if not _is_complete(path)]

    def _remove_unfinished(self) -> None:
        if jax.process_index() == 0:
            for path in self._unfinished():
                log.warning("removing %s: its save did not finish", path)
                path.rmtree()
        ocp.multihost.sync_global_processes("unfinished checkpoints removed")
        self._manager.reload()

    @contextlib.contextmanager
    def _failure_told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk alone shows as errors of Python, Orbax and tensorstore
            newest = max(self._steps(), default=None)
            rest = (
                "no step is saved yet" if newest is None else f"step {newest} is whole, and a restart goes on from it"
            )
            raise SaveError(
                f"step {self._saving} was not saved in {self._folder} ({_reason(error)}); {rest}: make room there, or "
                "mend what is wrong with it"
            ) from error

    @contextlib.contextmanager
    def _damage_named(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and tensorstore answer damaged files with errors of many kinds
            raise ValueError(
                f"{self._folder / str(step)} cannot be read ({_reason(error)}): remove it to go on from an earlier "
                "checkpoint"
            ) from error

    def _check_exists(self, step: int) -> None:
        steps = sorted(self._steps())
        if step not in steps:
            raise ValueError(f"step={step}: no complete checkpoint in {self._folder}, which holds {steps}")


def _arrays_handler() -> ocp.PyTreeCheckpointHandler:
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SHARED_BYTES)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _reason(error: Exception) -> str:
    """On one line; of a long text the ends, for tensorstore puts what went wrong behind two paths."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 240 else f'{text[:60]} … {text[-160:]}'}"


def _worth_showing(record: logging.LogRecord) -> bool:
    """Not the tracebacks that Orbax's threads write of errors which reach us anyway, one for each thread."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _is_complete(path: epath.Path) -> bool:
    # Storage without atomic rename marks a complete step by a file instead; Orbax knows which.
    return (
        path.name.isdecimal()
        and ocp.utils.is_checkpoint_finalized(path)
        and all((path / item).exists() for item in ITEMS)
    )


def _flatten(tree: Tree) -> dict[str, Any]:
    """Leaves by path, in tree order."""
    leaves = list(named_leaves(tree))
    flat = dict(leaves)
    if not flat or "" in flat or len(flat) < len(leaves):
        raise ValueError(f"expected a tree of arrays with distinct paths, got {len(leaves)} leaves at {list(flat)}")
    return flat


def _check_savable(path: str, leaf: Any) -> None:
    if not isinstance(leaf, jax.Array):
        raise ValueError(f"{path}: expected a jax array, got {type(leaf).__name__}; numbers belong in the host state")
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(f"{path}: dtype {leaf.dtype}; save jax.random.key_data of it")
    if leaf.is_deleted() or leaf.size == 0:
        state = "was deleted (donated)" if leaf.is_deleted() else f"is empty, shape {leaf.shape}"
        raise ValueError(f"{path}: the array {state}; there is nothing to save")


def _check_json(value: Any, path: str) -> None:
    """Refuse what JSON cannot hold or would give back as something else (a tuple, a number as key, nan)."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    elif not (value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))):
        raise ValueError(f"{path}={value!r}: expected null, a string, finite number, list or dict with string keys")
    for key, entry in entries:
        _check_json(entry, f"{path}.{key}")


def _check_same(wanted: dict[str, Any], saved: dict[str, Any], partial: bool) -> None:
    top = {path.partition("/")[0] for path in wanted}
    counted = [path for path in saved if not partial or path.partition("/")[0] in top]
    faults = [f"{path} {tuple(wanted[path].shape)} is not in the checkpoint" for path in wanted if path not in saved]
    faults += [f"{path} {tuple(saved[path].shape)} is only in the checkpoint" for path in counted if path not in wanted]
    for path in wanted.keys() & saved.keys():
        ours, theirs = wanted[path], saved[path]
        if (tuple(ours.shape), ours.dtype) != (tuple(theirs.shape), theirs.dtype):
            faults.append(
                f"{path} is {tuple(theirs.shape)} {theirs.dtype} in the checkpoint, "
                f"{tuple(ours.shape)} {ours.dtype} was asked for"
            )
    if faults:
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise ValueError(
            f"{len(faults)} arrays differ from the checkpoint: {'; '.join(sorted(faults)[:SHOWN] + more)}. Go on with "
            "the model and optimizer of the run it is of, or give another run_dir"
        )


def _restore_args(path: str, leaf: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
    if leaf.sharding is None:
        raise ValueError(f"{path}: no sharding given; a restored array needs one")
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
