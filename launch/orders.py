"""`python -m launch slurm|k8s|skypilot CONFIG`: options to a manifest, on standard output or in a file."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from jaxrl_post import recipes
from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from launch.manifests import Kubernetes, Order, Sky, Slurm, Tpu, jobset, sky_task, slurm_script


def add_options(parser: argparse.ArgumentParser, scheduler: str) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML recipe")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="as in training")
    parser.add_argument("--hosts", type=int, required=True, metavar="N", help="one process each")
    parser.add_argument(
        "--gpus-per-host", type=int, default=8, metavar="D", help="accelerators, of TPUs chips, of each (8)"
    )
    parser.add_argument("--max-restarts", type=int, default=3, metavar="R", help="go on from the last checkpoint (3)")
    parser.add_argument("--name", help="of the job (that of the run folder)")
    parser.add_argument("--to", metavar="FILE", help="write it here instead of to standard output")
    match scheduler:
        case "slurm":
            parser.add_argument("--time", default=Slurm.time, help=f"[DAYS-]HOURS:MINUTES:SECONDS ({Slurm.time})")
            parser.add_argument("--partition")
            parser.add_argument("--account")
            parser.add_argument("--cpus-per-host", type=int, default=Slurm.cpus, help=f"({Slurm.cpus})")
            parser.add_argument("--setup", action="append", default=[], metavar="LINE", help="shell, before the job")
        case "k8s":
            parser.add_argument("--image", required=True, help="a container image that holds this package")
            parser.add_argument("--claim", required=True, help="a ReadWriteMany volume claim for the run folder")
            parser.add_argument("--namespace", default="default")
            parser.add_argument("--tpu", metavar="KIND:TOPOLOGY", help="a TPU slice, such as tpu-v5p-slice:2x2x4")
        case "skypilot":
            parser.add_argument("--gpu", required=True, help="SkyPilot's name, such as H200")
            parser.add_argument("--bucket", required=True, help="such as s3://my-runs, mounted at the run folder")


def write(scheduler: str, given: argparse.Namespace, recipe: Path) -> None:
    """Raises: ValueError for a recipe that is wrong or whose mesh does not fit the hosts, and for wrong options."""
    config = recipes.load(recipe, given.overrides)
    order = _order(given, config)
    tpu = Tpu.parse(given.tpu) if scheduler == "k8s" and given.tpu is not None else None
    _check_mesh(order, config, tpu)
    text = _manifest(scheduler, given, order, tpu)
    if given.to is None:
        print(text, end="")
    else:
        try:
            Path(given.to).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--to {given.to}: {error.strerror}: name a file in a folder that exists") from error


def _order(given: argparse.Namespace, config: Config | OfflineConfig) -> Order:
    name = given.name or re.sub(r"[^a-z0-9]+", "-", Path(config.run_dir).name.lower()).strip("-")
    return Order(
        name=name,
        config=given.config,
        overrides=tuple(given.overrides),
        recipe=recipes.dump(config),
        run_dir=config.run_dir,
        hosts=given.hosts,
        accelerators=given.gpus_per_host,
        max_restarts=given.max_restarts,
    )


def _manifest(scheduler: str, given: argparse.Namespace, order: Order, tpu: Tpu | None) -> str:
    match scheduler:
        case "slurm":
            setup = tuple(given.setup)
            return slurm_script(order, Slurm(given.time, given.partition, given.account, given.cpus_per_host, setup))
        case "k8s":
            mount = Path(order.run_dir).parent
            if not mount.is_absolute() or mount == Path("/"):
                raise ValueError(
                    f"run_dir={order.run_dir}: the claim is mounted at its parent on every host; give an absolute path "
                    "of two parts at least, such as run_dir=/runs/name"
                )
            if tpu is not None:
                tpu.check(order)
            return jobset(order, Kubernetes(given.image, given.claim, str(mount), given.namespace, tpu))
        case _:
            return sky_task(order, Sky(given.gpu, given.bucket))


def _check_mesh(order: Order, config: Config | OfflineConfig, tpu: Tpu | None) -> None:
    from jaxrl_post.loops.network import mesh_sizes

    mesh_sizes(config, order.hosts * order.accelerators * (tpu.devices_of_a_chip if tpu else 1))
