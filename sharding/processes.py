"""Several processes that run one loop: what one of them knows becomes known to all. Knows no model.

All processes call each of these functions, in the same order. A job of one process pays for none of them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.placement import Tree, reshard

Item = TypeVar("Item")
Json = Any  # None, bool, int, float, text, and lists and dicts of these with text as keys; NaN is a float here
PHASE = "phase"  # subject of a post: what a process is at
WAITING = "waiting"  # subject of a post: what a process that has done its own share waits for
TOLD = "All processes of the job were told of this."
SMALLEST = 256  # bytes of a message; longer ones are powers of two, so that few programs are compiled
_imported = time.monotonic()
_posted: dict[str, tuple[str, float]] = {}  # by subject, with its time: where the others put it up may be out of reach


class PeerError(ValueError):
    """Another process failed at what all were to do."""


def is_first() -> bool:
    """Whether this process speaks for all: it writes the run's files and shows its progress."""
    return jax.process_index() == 0


def fetch(tree: Tree) -> Tree:
    """Whole arrays as numpy, on every process, wherever their parts are: one program brings all to all."""
    leaves, structure = jax.tree.flatten(tree)
    remote = {i: leaf for i, leaf in enumerate(leaves) if _has_remote_parts(leaf)}
    if remote:
        whole = {i: NamedSharding(leaf.sharding.mesh, PartitionSpec()) for i, leaf in remote.items()}
        remote = reshard(remote, whole)
    return jax.device_get(jax.tree.unflatten(structure, [remote.get(i, leaf) for i, leaf in enumerate(leaves)]))


def exchange(value: Json) -> list[Json]:
    """The values of all processes, in their order."""
    return _outcomes(lambda: value)


def from_first(make: Callable[[], Json]) -> Json:
    """What `make` gives on the first process, which alone calls it. Raises: as `split_work`."""
    return _outcomes(lambda: make() if is_first() else None)[0]


def together(work: Callable[[], Item]) -> Item:
    """`work()` on every process, each keeping its own result. Raises: as `split_work`."""
    kept: list[Item] = []
    _outcomes(lambda: kept.append(work()))
    return kept[0]


def split_work(items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Json]]) -> list[Json]:
    """`work(items)`, each process doing a run of them: one result for each item, in order.

    Raises: what `work` raised on this process, PeerError on those where it did not.
    """
    return [result for part in _outcomes(lambda: list(work(items[share(len(items))]))) for result in part]


def share(count: int) -> slice:
    """Which of `count` things are this process's: runs of equal length, up to one."""
    here, processes = jax.process_index(), jax.process_count()
    return slice(count * here // processes, count * (here + 1) // processes)


def check_same(what: str, value: Json) -> None:
    """Raises: ValueError on every process where `value` is not the same on all, naming the odd ones."""
    values = exchange(value)
    odd = [i for i, other in enumerate(values) if other != values[0]]
    if odd:
        raise ValueError(
            f"{what} must be the same on all {len(values)} processes: {values[0]!r} on process 0, "
            f"{values[odd[0]]!r} on process{'es' * (len(odd) > 1)} {', '.join(map(str, odd[:8]))}"
        )


def meet(mesh: Mesh) -> None:
    """On CPUs, let the devices of every group of mesh axes connect now.

    Gloo connects a group at its first collective and gives up when one comes half a minute late, which happens when the
    program before it took one process longer to compile.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    wide = [axis for axis, size in mesh.shape.items() if size > 1]
    groups = [axes for count in range(len(wide)) for axes in itertools.combinations(wide, count + 1)]
    cut = PartitionSpec(mesh.axis_names)
    sums = lambda x: sum(lax.psum(x, axes) for axes in groups)
    ones = jax.make_array_from_callback((mesh.size,), NamedSharding(mesh, cut), lambda _: np.ones(1, np.float32))
    jax.block_until_ready(jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=cut, out_specs=cut))(ones))


def post(subject: str, text: str) -> None:
    """Put up what this process is doing, for all to read without its help."""
    _posted[subject] = (text, time.monotonic())
    if (client := distributed.global_state.client) is not None:
        client.key_value_set(f"{subject}/{jax.process_index()}", text, allow_overwrite=True)


def posts(subject: str) -> dict[int, str]:
    """What each process has put up last, the empty text aside. Raises: RuntimeError when process 0 is gone."""
    if (client := distributed.global_state.client) is None:
        return {}
    found = {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(f"{subject}/")}
    return {process: found[process] for process in sorted(found) if found[process]}


def doing() -> str:
    """What this process has put up last, for a message: `update_actor for 12 s, waiting for the others`."""
    phase, since = _posted.get(PHASE, ("start", _imported))
    waits = _posted.get(WAITING, ("", 0.0))[0]
    return f"{phase} for {time.monotonic() - since:.0f} s{f', waiting for {waits}' if waits else ''}"


def _has_remote_parts(array: Any) -> bool:
    return isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated)


def _outcomes(work: Callable[[], Json]) -> list[Json]:
    """What `work` gives on each process; an error of one is an error of all, so that none waits for it."""
    if jax.process_count() == 1:
        return [work()]
    failed: Exception | None = None
    try:
        outcome = {"value": work()}
    except Exception as error:
        if TOLD in getattr(error, "__notes__", ()):  # by an exchange within `work`
            raise
        failed, outcome = error, {"error": f"{type(error).__name__}: {error}"[:2000]}
    post(WAITING, "the others")
    outcomes = [json.loads(message) for message in _messages(json.dumps(outcome).encode())]
    post(WAITING, "")
    for process, other in enumerate(outcomes):
        if "error" in other:
            failed = failed or PeerError(f"process {process} of {len(outcomes)}: {other['error']}")
            failed.add_note(TOLD)
            raise failed
    return [other["value"] for other in outcomes]


def _messages(mine: bytes) -> list[bytes]:
    """Those of all processes. Lengths first: a collective needs one shape everywhere."""
    lengths = multihost_utils.process_allgather(np.array([len(mine)], np.int32)).ravel().tolist()
    room = max(SMALLEST, 1 << (max(lengths) - 1).bit_length())
    padded = np.frombuffer(mine.ljust(room, b"\0"), np.uint8)
    gathered = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(gathered, lengths, strict=True)]
