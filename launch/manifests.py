"""Ready files for a cluster's scheduler: a Slurm batch script, a Kubernetes JobSet, a SkyPilot task.

One process a host, which owns all of the host's accelerators. docs/multihost.md says what each flag is for.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from typing import Any

import yaml

from launch.faults import REFUSED

PORT = 8476  # of process 0
GRACE_SECONDS = 300  # between the order to stop and the end: enough to finish a step and save
GPU_ENVIRONMENT = {
    "NCCL_DEBUG": "WARN",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    "XLA_FLAGS": " ".join(
        [
            "--xla_gpu_enable_latency_hiding_scheduler=true",
            "--xla_gpu_enable_pipelined_all_gather=true",
            "--xla_gpu_enable_pipelined_reduce_scatter=true",
            "--xla_gpu_nccl_termination_timeout_seconds=1800",
        ]
    ),
}
DEVICES_OF_A_CHIP = {"tpu7x": 2}  # as JAX shows them; Kubernetes counts chips
Manifest = dict[str, Any]

# What a name may be: RFC 1123's labels and subdomains as Kubernetes asks for them, its labels' values, the rest so that
# it stays one word of a shell or a comment.
LABEL = r"(?=.{1,63}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?"
SUBDOMAIN = r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
NAMES = {
    "--name": (
        r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
        "at most 40 lower-case letters, digits and dashes, a letter first, no dash last",
    ),
    "--namespace": (LABEL, "at most 63 lower-case letters, digits and dashes, no dash first or last"),
    "--claim": (SUBDOMAIN, "lower-case letters, digits, dashes and dots, a letter or digit first and last"),
    "--image": (r"[a-zA-Z0-9][\w.:/@+-]*", "[REGISTRY/]NAME[:TAG]"),
    "--partition": (r"[\w.,+-]+", "names of partitions without spaces"),
    "--account": (r"[\w.+-]+", "a name without spaces"),
    "--gpu": (r"[A-Za-z0-9._-]+", "SkyPilot's name alone, such as H200; --gpus-per-host says how many"),
    "--bucket": (r"[a-z0-9]+://[a-z0-9][\w.-]+(/[\w./-]*)?", "a store's address, such as s3://my-runs"),
}


def check_name(option: str, value: str) -> None:
    """Raises: ValueError, naming what is allowed, for what the scheduler would refuse or misread."""
    pattern, allowed = NAMES[option]
    if not re.fullmatch(pattern, value):
        raise ValueError(f"{option} {value!r}: expected {allowed}")


@dataclasses.dataclass(frozen=True)
class Order:
    """A job of `hosts` with `accelerators` each: its name, the recipe as given (`config`, `overrides`) and whole
    (`recipe`, YAML), the folder it writes to, and how often it is started anew after a failure. Of a TPU an accelerator
    is a chip.

    Raises: ValueError for counts below 1 and a name that Kubernetes would refuse.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    recipe: str
    run_dir: str
    hosts: int
    accelerators: int
    max_restarts: int

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--hosts", self.hosts, 1),
            ("--gpus-per-host", self.accelerators, 1),
            ("--max-restarts", self.max_restarts, 0),
        ):
            if value < least:
                raise ValueError(f"{option} {value}: at least {least}")
        check_name("--name", self.name)


@dataclasses.dataclass(frozen=True)
class Slurm:
    """What a batch script asks of the queue; `setup` are shell lines before the job (modules, an environment)."""

    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    cpus: int = 32
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time):
            raise ValueError(f"--time {self.time!r}: expected [DAYS-]HOURS:MINUTES:SECONDS, such as 24:00:00")
        if self.cpus < 1:
            raise ValueError(f"--cpus-per-host {self.cpus}: at least 1")
        for option, name in (("--partition", self.partition), ("--account", self.account)):
            if name is not None:
                check_name(option, name)


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A slice on GKE: `kind` such as tpu-v5p-slice, `topology` such as 2x2x4."""

    kind: str
    topology: str

    @classmethod
    def parse(cls, text: str) -> Tpu:
        kind, _, topology = text.partition(":")
        if not re.fullmatch(LABEL, kind) or not re.fullmatch(r"\d+x\d+(x\d+)?", topology):
            raise ValueError(f"--tpu {text!r}: expected KIND:TOPOLOGY, such as tpu-v5p-slice:2x2x4")
        return cls(kind, topology)

    @property
    def devices_of_a_chip(self) -> int:
        return DEVICES_OF_A_CHIP.get(self.kind.partition("-")[0], 1)

    def check(self, order: Order) -> None:
        """Raises: ValueError where the job's hosts have not as many chips as the slice, and so would never start."""
        chips, asked = math.prod(map(int, self.topology.split("x"))), order.hosts * order.accelerators
        if chips != asked:
            raise ValueError(
                f"--tpu {self.kind}:{self.topology} is {chips} chips, --hosts {order.hosts} with --gpus-per-host "
                f"{order.accelerators} are {asked}: give the slice's hosts, and the chips of each"
            )


@dataclasses.dataclass(frozen=True)
class Kubernetes:
    """Where pods run: `image` holds this package, the volume claim `claim` is mounted at `mount` on every host."""

    image: str
    claim: str
    mount: str
    namespace: str = "default"
    tpu: Tpu | None = None

    def __post_init__(self) -> None:
        for option, name in (("--image", self.image), ("--claim", self.claim), ("--namespace", self.namespace)):
            check_name(option, name)


@dataclasses.dataclass(frozen=True)
class Sky:
    """`gpu` by SkyPilot's name, such as H200; `bucket` is mounted at the run folder."""

    gpu: str
    bucket: str

    def __post_init__(self) -> None:
        check_name("--gpu", self.gpu)
        if "://" not in self.bucket:
            raise ValueError(
                f"--bucket {self.bucket!r} names no store, and SkyPilot would take it for a local path: give its "
                f"address, such as s3://{self.bucket}"
            )
        check_name("--bucket", self.bucket)


def slurm_script(order: Order, slurm: Slurm) -> str:
    """A batch script: one task a host, TERM before the time is up, the whole step again when a process fails."""
    options: dict[str, Any] = {
        "job-name": order.name,
        "nodes": order.hosts,
        "ntasks-per-node": 1,
        "gpus-per-node": order.accelerators,
        "cpus-per-task": slurm.cpus,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "signal": f"TERM@{GRACE_SECONDS}",
        "output": f"{order.name}-%j.log",
        "open-mode": "append",
    }
    asked = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in GPU_ENVIRONMENT.items()]
    command = shlex.join(["python", "-m", "launch", order.config, *order.overrides])
    loop = [
        f"for attempt in $(seq 0 {order.max_restarts}); do",
        f"  srun --kill-on-bad-exit=1 {command} && exit 0",
        "  code=$?",
        f'  [ "$code" -eq {REFUSED} ] && exit "$code"',
        '  echo "attempt $attempt ended with code $code" >&2',
        "done",
        'exit "$code"',
    ]
    return "\n".join(["#!/bin/bash", *asked, "set -u", *slurm.setup, *exports, *loop, ""])


def jobset(order: Order, kubernetes: Kubernetes) -> str:
    """A ConfigMap with the recipe and a JobSet of one indexed Job, a pod a host; YAML."""
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{order.name}-recipe", "namespace": kubernetes.namespace},
        "data": {"recipe.yaml": order.recipe},
    }
    job = {
        "parallelism": order.hosts,
        "completions": order.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [REFUSED]}}],
        },
        "template": {"spec": _pod(order, kubernetes)},
    }
    group = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": order.name, "namespace": kubernetes.namespace},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {
                "maxRestarts": order.max_restarts,
                "rules": [
                    {
                        "name": "refused",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": "hosts", "replicas": 1, "template": {"spec": job}}],
        },
    }
    return yaml.safe_dump_all([recipe, group], sort_keys=False, width=120)


def _pod(order: Order, kubernetes: Kubernetes) -> Manifest:
    resource = "google.com/tpu" if kubernetes.tpu else "nvidia.com/gpu"
    count = {resource: order.accelerators}
    container = {
        "name": "trainer",
        "image": kubernetes.image,
        "command": ["python", "-m", "launch", "/recipe/recipe.yaml"],
        "ports": [{"containerPort": PORT}],
        "env": _pod_environment(order, kubernetes),
        "resources": {"requests": count, "limits": dict(count)},  # one object twice is a YAML alias
        "volumeMounts": [
            {"name": "recipe", "mountPath": "/recipe", "readOnly": True},
            {"name": "storage", "mountPath": kubernetes.mount},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    pod: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "recipe", "configMap": {"name": f"{order.name}-recipe"}},
            {"name": "storage", "persistentVolumeClaim": {"claimName": kubernetes.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if kubernetes.tpu:
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": kubernetes.tpu.kind,
            "cloud.google.com/gke-tpu-topology": kubernetes.tpu.topology,
        }
    return pod


def _pod_environment(order: Order, kubernetes: Kubernetes) -> list[Manifest]:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    place: list[Manifest] = [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{order.name}-hosts-0-0.{order.name}:{PORT}"},
        {"name": "JAX_NUM_PROCESSES", "value": str(order.hosts)},
        {"name": "JAX_PROCESS_ID", "valueFrom": index},
    ]
    flags = {} if kubernetes.tpu else GPU_ENVIRONMENT
    return [*place, *({"name": name, "value": value} for name, value in flags.items())]


def sky_task(order: Order, sky: Sky) -> str:
    """A SkyPilot task, for `sky jobs launch`, which starts it anew when a host is lost; YAML."""
    run = [
        f'export JAX_COORDINATOR_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"',
        'export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES"',
        'export JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"',
        shlex.join(["python", "-m", "launch", order.config, *order.overrides]),
    ]
    task = {
        "name": order.name,
        "num_nodes": order.hosts,
        "resources": {
            "accelerators": f"{sky.gpu}:{order.accelerators}",
            "network_tier": "best",
            "job_recovery": {"max_restarts_on_errors": order.max_restarts},
        },
        "workdir": ".",
        "envs": dict(GPU_ENVIRONMENT),
        "file_mounts": {_absolute(order.run_dir): {"source": sky.bucket, "mode": "MOUNT"}},
        "setup": "pip install -e '.[cuda]'",
        "run": "\n".join(run) + "\n",
    }
    return yaml.safe_dump(task, sort_keys=False, width=120)


def _absolute(run_dir: str) -> str:
    if not run_dir.startswith("/"):
        raise ValueError(f"run_dir={run_dir}: a bucket is mounted there on every host; give an absolute path")
    return run_dir
