"""What every loop does with its run folder: where to go on from, the config kept there, when to save."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.data.curriculum import Curriculum
from jaxrl_post.data.stream import Stream
from jaxrl_post.models.decoder import Params
from jaxrl_post.observe.metrics import MetricsWriter, NoWriter, write_whole
from jaxrl_post.observe.progress import Progress
from sharding.processes import check_same, is_first, meet, together

log = logging.getLogger(__name__)
Which = int | Literal["best"] | None  # of a run's checkpoints; None is the newest
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SHARED_SECONDS = 60  # that network storage may take to show a file to another host


def last_step(checkpoints: Checkpointer, config: Config | OfflineConfig) -> int:
    """The step to go on from, 0 for a new run.

    Raises: ValueError where a new run is asked for in a folder that holds checkpoints.
    """
    newest = checkpoints.latest()
    if newest is not None and not config.checkpoint.resume:
        raise ValueError(
            f"run_dir={config.run_dir} holds checkpoints up to step {newest} and checkpoint.resume=false would write "
            "over them: choose another run_dir, or checkpoint.resume=true"
        )
    return newest or 0


@contextlib.contextmanager
def host_named(run_dir: Path, step: int) -> Iterator[None]:
    """While a checkpoint's host state is taken up. Raises: ValueError where it is not such as these runs save."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"run_dir={run_dir}: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{run_dir / 'checkpoints' / str(step) / 'host'} is not what a run of this kind saves "
            f"({type(error).__name__}: {error}): remove that checkpoint to go on from an earlier one, or give another "
            "run_dir"
        ) from error


def check_processes(config: Config | OfflineConfig, stream: Stream | Curriculum, mesh: Mesh) -> None:
    """Let the processes of a job begin alike.

    Raises: ValueError where they were given another recipe or other data, or one has no device of the mesh.
    """
    idle = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if idle:
        raise ValueError(
            f"the mesh of {mesh.size} devices has none of process {', '.join(map(str, sorted(idle)))}: make mesh.* the "
            f"product of all {jax.device_count()} devices, or start fewer processes"
        )
    recipe = hashlib.sha256(recipes.dump(config).encode()).hexdigest()[:16]
    check_same("the recipe, overrides among it (here its hash),", recipe)
    check_same("the data of the recipe (here their hash)", stream.state()["order"])
    meet(mesh)


@contextlib.contextmanager
def reporting(run_dir: Path, done: int, steps: int) -> Iterator[tuple[MetricsWriter | NoWriter, Progress]]:
    """Where a run writes its metrics and shows its progress: nowhere but on the first process."""
    with contextlib.ExitStack() as open_until:
        if not is_first():
            yield NoWriter(), open_until.enter_context(Progress(steps, Console(quiet=True, force_terminal=False)))
            return
        open_until.enter_context(_room_named(run_dir))
        writer = open_until.enter_context(MetricsWriter(run_dir, done or None))
        yield writer, open_until.enter_context(Progress(steps))


@contextlib.contextmanager
def _room_named(run_dir: Path) -> Iterator[None]:
    """Say which folder is full; a failed write itself does not know its file."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM and error.filename is None:
            raise OSError(
                error.errno, f"{error.strerror}; a restart goes on from its last step saved", str(run_dir)
            ) from error
        raise


def write_config(config: Config | OfflineConfig, run_dir: Path) -> None:
    """The resolved config; where a resumed run changes it, say what. The first process does it, the others look for it.

    Raises: ValueError where the run folder of another process is not the first one's.
    """
    path, text = run_dir / "config.yaml", recipes.dump(config)
    if is_first():
        _write_config(path, text)
    together(lambda: _check_shared(path, text))


def _check_shared(path: Path, text: str) -> None:
    waited = 0
    while not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
        if waited == SHARED_SECONDS:
            raise ValueError(
                f"run_dir={path.parent} does not hold what process 0 wrote there {waited} s ago: put it on storage "
                "that all hosts share"
            )
        time.sleep(1)
        waited += 1


def _write_config(path: Path, text: str) -> None:
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else text
    if changes := recipes.changes(before, text):
        log.warning("%s changes: %s", path, "; ".join(changes))
    with _room_named(path.parent):
        write_whole(path, [text])  # never a part, nor nothing where the disk is full


def due(step: int, every: int, steps: int) -> bool:
    """Whether something done every `every` steps (0: never in between) and at the end is done now."""
    return step == steps or bool(every and step % every == 0)


def saved_params(run_dir: Path, abstract: Params, which: Which = None) -> tuple[Params, int]:
    """The weights of one of a run's complete checkpoints in the structure and on the shardings of `abstract`, and its
    step.

    Raises: ValueError as `newest_step` and `_chosen`, and for weights of another shape.
    """
    newest = newest_step(run_dir)
    step = newest if which is None else _chosen(run_dir, newest, which)
    return params_of(run_dir, step, abstract), step


def _chosen(run_dir: Path, newest: int, which: int | Literal["best"]) -> int:
    """Raises: ValueError for a step that is not there, and for the best one of a run that keeps none."""
    with contextlib.closing(Checkpointer(run_dir / "checkpoints", keep_last=1)) as checkpoints:
        steps, host = checkpoints.steps(), checkpoints.restore_host(newest)
    with host_named(run_dir, newest):
        step: Any = (host.get("best") or {}).get("step") if which == "best" else which
    if step in steps:
        return int(step)
    lacks = "keeps no best step (checkpoint.keep_best)" if step is None else f"has no step {step}"
    raise ValueError(f"--step {which}: {run_dir} {lacks}; its checkpoints are of {', '.join(map(str, steps))}")


def newest_step(run_dir: Path) -> int:
    """Of the complete checkpoints of a run. Raises: ValueError for a folder that is no run or has none yet."""
    _config_path(run_dir)
    if not (run_dir / "checkpoints").is_dir():
        raise ValueError(
            f"{run_dir} has no checkpoints yet: train it first; a run writes one every checkpoint.every steps and at "
            "its end"
        )
    with contextlib.closing(Checkpointer(run_dir / "checkpoints", keep_last=1)) as checkpoints:
        step = checkpoints.latest()
    if step is None:
        raise ValueError(f"{run_dir / 'checkpoints'} holds no complete checkpoint yet")
    return step


def params_of(run_dir: Path, step: int, abstract: Params) -> Params:
    """The weights a run saved at `step`, as `saved_params`."""
    with contextlib.closing(Checkpointer(run_dir / "checkpoints", keep_last=1)) as checkpoints:
        arrays, _ = checkpoints.restore(step, {"params": abstract}, partial=True)
    return arrays["params"]


def run_config(run_dir: Path) -> Config | OfflineConfig:
    """The recipe a run was started with. Raises: ValueError for a folder that is no run."""
    return recipes.load(_config_path(run_dir))


def _config_path(run_dir: Path) -> Path:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run_dir} is not the folder of a run: it has no config.yaml; give the recipe's run_dir")
    return path
