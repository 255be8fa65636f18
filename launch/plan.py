"""`python -m launch plan`: a recipe's programs compiled for hardware that is not there, and what they would take."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.loops.decoder_shape import model_config
from jaxrl_post.loops.offline_planning import OfflinePlanner
from jaxrl_post.loops.planned import USABLE, Plan, ProgramPlan
from jaxrl_post.loops.planned_rollout import ROLLOUT_WEIGHTS
from jaxrl_post.loops.planning import Planner
from jaxrl_post.models.zoo import resolve
from jaxrl_post.observe.progress import clock
from jaxrl_post.observe.sizes import size_text
from sharding.mesh import AXES
from sharding.targets import Target, open_target, parse_target

GIB = 2**30
FITS, DOES_NOT_FIT = 0, 1
Sizes = tuple[tuple[str, int], ...]  # of the axes that are wider than 1


def plan(config: Config | OfflineConfig, targets: Sequence[str], as_json: bool, sweep: bool) -> int:
    """Prints a report for each target; returns the exit code: 0 all fit, 1 one does not, 2 one cannot be compiled.

    Raises: ValueError for a target or recipe that cannot be planned.
    """
    reports, worst = [], FITS
    for target in [parse_target(name) for name in targets]:
        devices = open_target(target)
        plans, refused = _sweep(config, target, devices) if sweep else ([planner(config, target, devices).plan()], {})
        reports += [as_dict(one) for one in plans]
        reports += [{"target": target.name, "mesh": dict(mesh), "refused": why} for mesh, why in refused.items()]
        worst = max(worst, FITS if any(one.fits for one in plans) else DOES_NOT_FIT)
        if not as_json:
            ranked = [ranking(plans, refused)] if sweep else []
            print("\n\n".join([describe(one) for one in plans[:1]] + ranked), flush=True)
    if as_json:
        print(json.dumps(reports, indent=1))
    return worst


def planner(config: Config | OfflineConfig, target: Target, devices: Sequence[Any]) -> Planner | OfflinePlanner:
    if isinstance(config, OfflineConfig):
        return OfflinePlanner(config, target, devices)
    return Planner(config, target, devices)


def _sweep(
    config: Config | OfflineConfig, target: Target, devices: Sequence[Any]
) -> tuple[list[Plan], dict[Sizes, str]]:
    """Plans for the mesh factorizations that the model allows, those that fit and are fast first, and why others are
    none, in one line each. What is found of a mesh is told on stderr at once, those that compile fastest first."""
    plans, refused = [], {}
    folder = None if config.model.path is None else resolve(config.model.path)
    moe = model_config(config, folder, 0, target.chip.platform).moe
    meshes = sorted(factorizations(len(devices), target.per_link, moe.count if moe else 1), key=_width)
    begun = time.monotonic()
    for number, mesh in enumerate(meshes, 1):
        axes = tuple((axis, n) for axis, n in mesh.items() if n > 1)
        changed = config.model_copy(update={"mesh": config.mesh.model_copy(update=mesh)})
        try:
            one = planner(changed, target, devices)
            plans.append(one.without_room() or one.plan())
            told = _found(plans[-1])
        except ValueError as error:
            told = refused[axes] = " ".join(str(error).split())
        took = time.monotonic() - begun
        left = f"; {clock(took)} so far, about {clock(took / number * (len(meshes) - number))} to go"
        print(f"mesh {number} of {len(meshes)}, {_axes(dict(axes))}: {told}{left}", file=sys.stderr, flush=True)
    if not plans:
        reasons = "; ".join(f"{_axes(dict(mesh))}: {why}" for mesh, why in refused.items())
        raise ValueError(f"no mesh of {target.name} takes the model: {reasons}")
    return sorted(plans, key=lambda one: (not one.fits, one.step_seconds or math.inf)), refused


def _width(mesh: Mapping[str, int]) -> tuple[int, int]:
    """A program is the larger and slower to compile the more axes cut it, and `tensor` cuts it most."""
    return sum(n > 1 for n in mesh.values()), mesh["tensor"]


def _found(one: Plan) -> str:
    if (no_room := next((program.refused for program in one.programs if program.refused), None)) is not None:
        return f"does not fit: {no_room}"
    peak = size_text(max(program.peak for program in one.programs))
    return f"{'fits' if one.fits else 'does not fit'}, {peak}, {one.step_seconds:.1f} s a step"


def factorizations(devices: int, per_link: int, experts: int = 1) -> Iterator[dict[str, int]]:
    """Sizes of the axes: tensor a power of two up to 8 within a host, data 1 or one group a host, expert 1 or, of a
    model with experts, as much as divides them up to 8 within a host; fsdp takes what remains."""
    most = math.gcd(8, per_link, experts)
    for tensor, expert, data in itertools.product((1, 2, 4, 8), sorted({1, most}), sorted({1, devices // per_link})):
        if tensor <= per_link and data and devices % (tensor * expert * data) == 0:
            fsdp = devices // (tensor * expert * data)
            yield dict.fromkeys(AXES, 1) | {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}


def describe(one: Plan) -> str:
    """The report of one plan as text."""
    chip, axes = one.target.chip, _axes(one.mesh)
    count = f"{one.parameters / 1e9:.2f}B" if one.parameters >= 1e8 else f"{one.parameters / 1e6:.2f}M"
    lines = [f"{one.target.name}: {count} parameters on {axes}"]
    lines += [f"  a rollout: {one.shape}"] if one.shape else []
    for program in one.programs:
        lines += ["", *_program_lines(program, chip.memory)]
    lines.append("")
    if one.step_seconds is not None:
        lines.append(f"estimate of a step (every sample to its limit, the chip's peak rates): {one.step_seconds:.1f} s")
    room = f"{USABLE * chip.memory / GIB:.1f} of {chip.memory / GIB:.1f} GiB"
    lines.append(f"fits in {room} a device" if one.fits else f"DOES NOT FIT in {room} a device")
    return "\n".join(lines + [f"  {line}" for line in advice(one)])


def _program_lines(program: ProgramPlan, memory: int) -> Iterator[str]:
    times = f", {program.runs} times a step" if program.runs > 1 else ""
    if program.refused is not None:
        yield f"{program.name}{times}: no room: {program.refused}"
        return
    yield f"{program.name}{times}, on each device (compiled in {program.compile_seconds:.0f} s)"
    for item in program.items:
        yield f"  {item.name:36} {size_text(item.bytes):>13}"
    yield f"  {'in all':36} {size_text(program.peak):>13}  {program.peak / memory:5.0%}"
    for item in program.on_host:
        yield f"  in the host's memory: {item.name:14} {size_text(item.bytes):>13}"
    yield f"  matrix products {program.flops / 1e12:,.1f} TFLOP, read from memory {program.traffic / 1e9:,.0f} GB"
    for c in program.collectives:
        yield f"  {c.kind} over {'×'.join(c.axes) or 'no axis'}: {c.count:,} times, {c.sent / 1e9:,.2f} GB sent"
    if program.kernels:
        yield "  kernels: " + ", ".join(f"{name} ×{count}" for name, count in program.kernels.items())
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in program.seconds.items())
    yield f"  estimate, roofline: {seconds}"


def ranking(plans: Sequence[Plan], refused: Mapping[Sizes, str] = MappingProxyType({})) -> str:
    """One line a mesh, the best first, and after them those that are refused."""
    lines = ["meshes, the best first"]
    for one in plans:
        unknown = one.step_seconds is None
        peak = "no room" if unknown else size_text(max(program.peak for program in one.programs))
        time = "" if unknown else f"{one.step_seconds:.1f} s a step"
        lines.append(f"  {_axes(one.mesh):32} {peak:>12}  {'fits' if one.fits else 'does not fit':12}  {time}")
    lines += [f"  {_axes(dict(mesh)):32} {'refused':>12}  {why}" for mesh, why in refused.items()]
    return "\n".join(lines)


def _axes(mesh: Mapping[str, int]) -> str:
    return " × ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one device"


CUT_MORE = "more devices, or mesh.fsdp larger in place of mesh.data"
CHANGES = {
    "parameters": CUT_MORE,
    "optimizer": f"optimizer.offload=true, or {CUT_MORE}",
    ROLLOUT_WEIGHTS: "mesh.tensor larger: rollouts cut weights over it alone",
    "cache": "rollout.slots or rollout.max_new_tokens lower, or mesh.tensor larger",
    "sums of gradients": CUT_MORE,
    "reference policy": "algorithm.kl.coef=0 needs none; nor, of methods that train from files, "
    "training.cache_reference=true",
    "policy": CUT_MORE,
    "policy's optimizer": f"optimizer.offload=true, or {CUT_MORE}",
    "critic": "algorithm.critic.decoder=shared",
    "activations and other temporaries": "model.remat=full, training.tokens_per_microbatch or "
    "training.logprob_chunk lower; in a rollout rollout.prefill_columns lower",
}


def advice(one: Plan) -> Iterator[str]:
    """What to change, the largest part first, for each program that does not fit."""
    for program in one.programs:
        if program.refused is not None:
            of_rollout = "cache", "activations and other temporaries", ROLLOUT_WEIGHTS
            for name in (
                of_rollout if program.name == "rollout" else ("parameters", "activations and other temporaries")
            ):
                yield f"{program.name}: {CHANGES[name]}"
        elif program.peak > USABLE * one.target.chip.memory:
            for item in sorted(program.items, key=lambda item: -item.bytes)[:3]:
                if item.name in CHANGES:
                    yield f"{program.name}, {item.name} ({size_text(item.bytes)}): {CHANGES[item.name]}"


def as_dict(one: Plan) -> dict[str, Any]:
    """As JSON: bytes, operations and seconds of one device."""
    return {
        "target": one.target.name,
        "mesh": one.mesh,
        "parameters": one.parameters,
        "memory": one.target.chip.memory,
        "fits": one.fits,
        "step_seconds_estimate": one.step_seconds,
        "programs": [
            dataclasses.asdict(program)
            | {
                "peak": program.peak,
                "items": {i.name: i.bytes for i in program.items},
                "on_host": {i.name: i.bytes for i in program.on_host},
            }
            for program in one.programs
        ],
        "advice": list(advice(one)),
    }
