"""Hardware by name, attached or not: what a chip has, and a topology to compile programs for.

A TPU target is a generation and its torus (`v5p:8x8x16`), a GPU target is hosts × GPUs of each (`h200:2x8`). Compiling
needs the vendor's compiler, libtpu or the CUDA plugin of jax, and no device.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device of a kind, by its maker's numbers.

    memory: bytes. flops: dense bfloat16, a second. bandwidth: bytes a second from memory. link: bytes a second that a
    device sends to others of its host or torus; network: to other hosts; host: to its own host's memory.
    """

    platform: Literal["tpu", "gpu"]
    memory: int
    flops: float
    bandwidth: float
    link: float
    network: float
    host: float


# TPUs: Google Cloud's system architecture pages (a v5e chip has 16 GB, 197 TFLOP/s and 819 GB/s); link is a ring over
# one axis of the torus in both directions (a v5e's four ports give 200 GB/s). A tpu7x chip is two devices, and these
# are the halves. GPUs: NVIDIA's data sheets of the SXM modules; link is NVLink one way, network 400 Gbit/s a GPU, host
# PCIe 5.0 ×16 one way. For TPUs' hosts nothing is published; PCIe 3.0 ×16 is taken for all.
CHIPS: Mapping[str, Chip] = {
    "v5e": Chip("tpu", 16 * GIB, 197e12, 819e9, 90e9, 25e9 / 4, 16e9),
    "v5p": Chip("tpu", 95 * GIB, 459e12, 2765e9, 180e9, 25e9 / 4, 16e9),
    "v6e": Chip("tpu", 32 * GIB, 918e12, 1640e9, 180e9, 25e9 / 4, 16e9),
    "tpu7x": Chip("tpu", 96 * GIB, 1153e12, 3690e9, 200e9, 25e9 / 4, 16e9),
    "h100": Chip("gpu", 80 * 10**9, 989e12, 3350e9, 450e9, 50e9, 64e9),
    "h200": Chip("gpu", 141 * 10**9, 989e12, 4800e9, 450e9, 50e9, 64e9),
}
FORMS = "v5e:4x4, v5p:8x8x16, v6e:16x16, tpu7x:4x4x4 (a TPU and its torus), h100:4x8, h200:2x8 (hosts × GPUs of each)"
TORUS = {"v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
EXTRAS = {"tpu": ("libtpu", "plan-tpu"), "gpu": ("jax_plugins.xla_cuda13", "plan-gpu")}
# XLA picks GPU kernels by timing them, which needs the GPU. Their code is never run, so it is not optimised either.
GPU_OPTIONS = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclasses.dataclass(frozen=True)
class Target:
    """`sizes`: a TPU's torus, or (hosts, GPUs of each)."""

    name: str
    kind: str
    sizes: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def compiler_options(self) -> dict[str, Any]:
        return dict(GPU_OPTIONS) if self.chip.platform == "gpu" else {}

    @property
    def hasty_options(self) -> dict[str, Any]:
        """`compiler_options` for who reads programs and has no time: TPUs' compiler takes a third of it, and up to 4 %
        more memory (Qwen3-0.6B on a v5e)."""
        return self.compiler_options or {"exec_time_optimization_effort": -1.0}

    @property
    def per_link(self) -> int:
        """Devices that reach each other without a network: a host's GPUs, or all of a torus."""
        return self.sizes[1] if self.chip.platform == "gpu" else math.prod(self.sizes) * 2


def parse_target(text: str) -> Target:
    """Raises: ValueError naming the target, the forms that are allowed and the nearest one."""
    kind, _, shape = text.partition(":")
    if kind not in CHIPS:
        near = difflib.get_close_matches(kind, CHIPS, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"target {text!r}: no chip is called {kind!r}.{meant} Write one as {FORMS}")
    wanted = TORUS.get(kind, 2)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) or shape.count("x") + 1 != wanted:
        what = f"a torus of {wanted} axes" if kind in TORUS else "hosts x GPUs of each"
        raise ValueError(f"target {text!r}: after {kind}: comes {what}. Write a target as {FORMS}")
    return Target(text, kind, tuple(map(int, shape.split("x"))))


def open_target(target: Target) -> list[Any]:
    """The target's devices, to make a mesh of; they hold no arrays.

    The process must have been told to look for no device before it first used jax: `launch.no_devices`.

    Raises: ValueError when the vendor's compiler is not installed (naming the extra) or knows no such topology.
    """
    import jax
    from jax.experimental import topologies

    module, extra = EXTRAS[target.chip.platform]
    if importlib.util.find_spec(module.partition(".")[0]) is None or importlib.util.find_spec(module) is None:
        raise ValueError(f"target {target.name} needs the extra {extra}: pip install -e '.[{extra}]'")
    jax.devices("cpu")  # registers the plugins
    shape = "x".join(map(str, target.sizes))
    try:
        if target.chip.platform == "tpu":
            return topologies.get_topology_desc(platform="tpu", topology_name=f"{target.kind}:{shape}").devices
        return topologies.get_topology_desc(
            platform="cuda", topology_name=target.kind, target_config=_gpu_config(target), topology=f"1x{shape}"
        ).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"target {target.name}: its compiler refuses the topology ({reason}). Try {FORMS}") from error


def _gpu_config(target: Target) -> str:
    """XLA's description of the GPU, for a compiler that cannot ask it."""
    chip, l2 = target.chip, {"h100": 50, "h200": 60}[target.kind] * 2**20
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {l2} clock_rate_ghz: 1.98
  device_memory_size: {chip.memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 minor: 0 }}
device_description_str: "NVIDIA {target.kind.upper()}"
"""
