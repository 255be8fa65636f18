"""Joining the processes of a job: where this one stands, from options, the environment or the cluster's scheduler."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Mapping

from launch.faults import BUG, exit_code
from launch.lines import ASKED, Lines
from launch.rollcall import Connections, Place, StartError, answer

HEARTBEAT_SECONDS = 40  # beyond --lost-limit, which is first to end a job; then JAX does, in its own way
SHUTDOWN_SECONDS = 60  # that a process which is done waits for the others
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
OPTIONS = ("--coordinator", "--process-id", "--processes-total")
SCHEDULED = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several hosts (found out under Slurm, Open MPI, JobSet and on TPU pods)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--process-id", type=int, metavar="I", help="which process this is, from 0")
    group.add_argument("--processes-total", type=int, metavar="N", help="how many there are")
    group.add_argument("--join-limit", type=float, default=300.0, metavar="S", help="seconds to wait for all (300)")
    group.add_argument(
        "--lost-limit",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds without a process's answer to end after (60)",
    )


def find_place(given: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Place | None:
    """Where this process stands, None for a job of one.

    Raises: ValueError for options or variables that are incomplete or wrong, and for one of many processes that nothing
    tells where process 0 is.
    """
    for option, value, least in (("join", given.join_limit, 0), ("lost", given.lost_limit, ASKED)):
        if not least <= value < math.inf:
            raise ValueError(f"--{option}-limit {value:g}: expected seconds, {least} or more")
    options = (given.coordinator, given.process_id, given.processes_total)
    if given.coordinator is not None:
        _check_address(OPTIONS[0], given.coordinator)
    if any(value is not None for value in options):
        return _checked(OPTIONS, *_complete(OPTIONS, options))
    variables = tuple(environ.get(name) for name in VARIABLES)
    if environ.keys() & set(VARIABLES[1:]):
        coordinator, process, processes = _complete(VARIABLES, variables)
        _check_address(VARIABLES[0], coordinator)
        return _checked(VARIABLES, coordinator, _number(VARIABLES[1], process), _number(VARIABLES[2], processes))
    return _scheduled(environ, int(given.join_limit))


def check_alone(given: argparse.Namespace) -> None:
    """Raises: ValueError where --processes, which chooses a coordinator of its own, comes with the options of one."""
    if any(value is not None for value in (given.coordinator, given.process_id, given.processes_total)):
        raise ValueError(f"--processes starts a whole job on this machine: leave out {', '.join(OPTIONS)}")


@contextlib.contextmanager
def joined(place: Place | None, join_limit: float, lost_limit: float) -> Iterator[None]:
    """Be one of the processes of a job; for None, a job of its own. Who fails leaves without waiting for the others.

    Raises: StartError as `answer`.
    """
    if place is None:
        yield
        return
    connections = answer(place, join_limit)
    from sharding.processes import doing

    with Lines(place, connections, lost_limit, doing) as lines:
        try:
            _initialize(place, join_limit, lost_limit)
            _let_gloo_listen(_own_address(connections))
            yield
        except BaseException as error:
            code = exit_code(error)
            if code == BUG:
                print(f"process {place.process} of {place.processes} failed in {doing()}", file=sys.stderr, flush=True)
            lines.leave(code)
            # Runs before JAX's own farewell, which waits for all processes.
            atexit.register(_leave, code)
            raise


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _initialize(place: Place, join_limit: float, lost_limit: float) -> None:
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # the loop itself agrees on when to stop
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.process,
        local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(join_limit), 1),
        heartbeat_timeout_seconds=int(lost_limit) + HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )


def _let_gloo_listen(address: str) -> None:
    """Let devices of CPUs be reached at `address`. Gloo would take the one that the host's name leads to, which on many
    machines is 127.0.0.1."""
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax

    gloo = lambda: _jax.make_gloo_tcp_collectives(distributed.global_state.client, hostname=address)
    xla_bridge.register_backend_factory("cpu", lambda: xla_bridge.make_cpu_client(gloo()), fail_quietly=False)


def _own_address(connections: Connections) -> str:
    """Of this host, as the others see it."""
    return next(iter(connections.values())).getsockname()[0].removeprefix("::ffff:")


def _complete(names: tuple[str, ...], values: tuple) -> tuple:
    absent = [name for name, value in zip(names, values, strict=True) if value is None]
    if absent:
        raise ValueError(f"{', '.join(names)} belong together: {' and '.join(absent)} is not given")
    return values


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{name}={value!r}: expected a number")
    return int(value)


def _check_address(name: str, coordinator: str) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{name} {coordinator!r}: expected HOST:PORT, such as 10.0.0.1:8476")


def _checked(names: tuple[str, ...], coordinator: str, process: int, processes: int) -> Place | None:
    if processes < 1:
        raise ValueError(f"{names[2]} {processes}: at least 1")
    if not 0 <= process < processes:
        raise ValueError(
            f"{names[1]} {process} of {names[2]} {processes}: processes are numbered from 0 to {processes - 1}"
        )
    return Place(coordinator, process, processes) if processes > 1 else None


def _scheduled(environ: Mapping[str, str], limit: int) -> Place | None:
    """As JAX finds it out from the scheduler's environment."""
    indexed_pod = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys()
    # Its Kubernetes reader needs a package, and outside a Job looks for what is not there.
    asked = environ.keys() & set(SCHEDULED) or (indexed_pod and importlib.util.find_spec("kubernetes")) or _on_tpu()
    found = _by_jax(limit) if asked else None
    if found is None and (indexed_pod or environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1"):
        raise ValueError(
            "this is one of several processes, and nothing tells where process 0 is: give --coordinator HOST:PORT, "
            f"--process-id and --processes-total, or set {', '.join(VARIABLES)} (python -m launch k8s writes them)"
        )
    if found is None or found.processes == 1:
        return None
    # JAX gives each process one device of its host; a process that has the host to itself takes all.
    alone = "1" in (environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"), _slurm_tasks_per_node(environ))
    return dataclasses.replace(found, local_devices=None) if alone else found


def _slurm_tasks_per_node(environ: Mapping[str, str]) -> str | None:
    """The first node's, of `2(x3),1`."""
    return environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition(",")[0].partition("(")[0] or None


def _on_tpu() -> bool:
    if importlib.util.find_spec("libtpu") is None:
        return False
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

    return running_in_cloud_tpu_vm


def _by_jax(limit: int) -> Place | None:
    from jax._src.clusters import ClusterEnv

    try:
        address, processes, process, local = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, limit
        )
    except (RuntimeError, OSError, KeyError) as error:
        raise StartError(
            f"the scheduler's environment does not tell where process 0 is ({type(error).__name__}: {error}): give "
            f"{', '.join(OPTIONS)}"
        ) from error
    if address is None or processes is None or process is None:
        return None
    return Place(address, process, processes, None if local is None else tuple(local))
