"""One program of a plan: compiled for a target's devices from shapes alone, and what is read from it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Traced

from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_post.loops.network import Network, build_network
from jaxrl_post.loops.out_of_memory import is_out_of_memory
from jaxrl_post.loops.planned_rows import looked_at
from jaxrl_post.models import exchange
from jaxrl_post.models.zoo import resolve
from jaxrl_post.observe.sizes import size_text
from jaxrl_post.training.packing import PackShape
from jaxrl_post.training.state import TrainState
from jaxrl_post.types import TrainBatch
from sharding.memory import placed_bytes
from sharding.placement import Tree
from sharding.report import Collective, Memory, Program, count_flops, memory_of
from sharding.targets import Target

USABLE = 0.92  # of a device's memory; the rest is the runtime's own and what lies idle between arrays


@dataclasses.dataclass(frozen=True)
class Item:
    """Something on each device, in bytes, while one of the programs runs."""

    name: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """One program on each device: what lies there, and in its host's memory, while it runs, its operations,
    communication and kernels.

    `runs` a step. `seconds` are those of one run at the chip's peaks, communication not overlapped: an estimate.
    `refused` says why there is no room, as the compiler does or `without_room`; nothing but `name` and `runs` is known
    then.
    """

    name: str
    runs: int
    items: tuple[Item, ...] = ()
    on_host: tuple[Item, ...] = ()
    flops: float = 0.0
    traffic: float = 0.0
    collectives: tuple[Collective, ...] = ()
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    compile_seconds: float = 0.0
    refused: str | None = None

    @property
    def peak(self) -> int:
        return sum(item.bytes for item in self.items)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe on a target. `shape` says how a rollout is laid out, and is empty where there is none."""

    target: Target
    mesh: dict[str, int]
    parameters: int
    shape: str
    programs: tuple[ProgramPlan, ...]

    @property
    def fits(self) -> bool:
        room = USABLE * self.target.chip.memory
        return all(program.refused is None and program.peak <= room for program in self.programs)

    @property
    def step_seconds(self) -> float | None:
        """None where a program is refused."""
        if any(program.refused is not None for program in self.programs):
            return None
        return sum(program.runs * sum(program.seconds.values()) for program in self.programs)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A program before it is compiled: `runs` a step, `traffic` bytes read from memory, and bytes on a device by name.

    `held` lies there beside the program, `made` is the program's own; of that `inside`, if any, is one of its
    temporaries.
    `on_host` lies in the host's memory, of which a run fetches `fetched` bytes and writes as many back.
    `trips` and `filled` as for `sharding.report.Program`, `shares` as for `count_flops`.
    """

    name: str
    runs: int
    traced: Traced
    held: dict[str, int]
    made: dict[str, int]
    inside: str
    trips: list[int]
    traffic: float
    on_host: dict[str, int]
    fetched: int = 0
    filled: float = 1.0
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)


def planned_update(
    name: str,
    runs: int,
    traced: Traced,
    state: TrainState,
    gradients: Tree,
    held: dict[str, int],
    on_host: dict[str, int],
    network: Network,
    shape: PackShape,
    rows: TrainBatch,
    reads: Mapping[str, int] = MappingProxyType({}),
) -> Planned:
    """An optimizer update of `state` on rows like these; `reads` is what its program is handed beside the state, on a
    device.

    Weights, gathered, are read three times a micro-batch; state and gradients are read and written once.
    """
    own = state_bytes(state) | {"sums of gradients": placed_bytes(gradients)}
    gathered = placed_bytes(network.rollout_shapes())  # as products read them
    traffic = 3 * shape.micro_batches * gathered + 2 * sum(own.values())
    made, fetched = {**own, **reads}, placed_bytes(state, on_host=True)
    trips = [shape.micro_batches]
    filled, shares = sent_share(network), looked_at(rows, network.model)
    return Planned(
        name, runs, traced, held, made, "sums of gradients", trips, traffic, on_host, fetched, filled, shares
    )


def stand_in_network(
    config: Config | OfflineConfig, devices: Sequence[Any], has_teachers: bool
) -> tuple[Network, Tokenizer]:
    """A recipe's model on `devices`, and a tokenizer that needs no files.

    Raises: ValueError for a model without a readable config.json, sizes that do not divide, and teachers.
    """
    if has_teachers:
        raise ValueError(f"algorithm.kind={config.algorithm.kind} has teachers, which cannot be planned yet")
    folder = None if config.model.path is None else resolve(config.model.path)
    tokenizer = load_tokenizer(None)
    return build_network(config, folder, tokenizer, devices), tokenizer


def wide_axes(mesh: Mesh) -> dict[str, int]:
    """Sizes of the axes that cut anything."""
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def sent_share(network: Network) -> float:
    """Of the room for tokens that devices send each other to their experts, what is filled on average."""
    moe, devices = network.model.moe, network.mesh.shape["expert"]
    return exchange.share(moe, devices) if moe and devices > 1 else 1.0


def state_bytes(state: TrainState) -> dict[str, int]:
    """On a device."""
    return {"parameters": placed_bytes(state.params), "optimizer": placed_bytes(state.opt_state)}


def compile_planned(planned: Planned, target: Target, mesh: Mesh) -> ProgramPlan:
    """Raises: ValueError when the program cannot be compiled, for another reason than room."""
    begun = time.monotonic()
    try:
        compiled = planned.traced.lower().compile(compiler_options=target.hasty_options)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise ValueError(f"the {planned.name} does not compile for {target.name}: {error}") from error
        return ProgramPlan(planned.name, planned.runs, refused=_reason(str(error)))
    took = time.monotonic() - begun
    program = Program(compiled.as_text(), planned.trips, planned.filled)
    collectives = tuple(program.collectives(mesh))
    flops = count_flops(planned.traced.jaxpr, planned.trips, planned.shares) / mesh.size
    memory = memory_of(compiled)
    items = planned.held | _shared_out(memory, planned.made, planned.inside)
    on_host = planned.on_host | {"activations": memory.host_temporaries}
    moved = planned.fetched + planned.trips[0] * memory.host_temporaries
    return ProgramPlan(
        name=planned.name,
        runs=planned.runs,
        items=_items(items),
        on_host=_items(on_host),
        flops=flops,
        traffic=planned.traffic,
        collectives=collectives,
        kernels=program.kernels(),
        seconds=roofline(target, mesh, flops, planned.traffic, collectives, moved),
        compile_seconds=took,
    )


def without_room(target: Target, least: Mapping[str, Mapping[str, int]]) -> tuple[ProgramPlan, ...]:
    """The programs that need not be compiled to see that they do not fit: `least` are bytes by name that lie on a
    device while each of them runs."""
    room, refused = USABLE * target.chip.memory, []
    for name, items in least.items():
        if (needed := sum(items.values())) > room:
            what = ", ".join(item for item, size in items.items() if size)
            why = f"{what} alone take {size_text(needed)} of {size_text(room)} a device"
            refused.append(ProgramPlan(name, 1, refused=why))
    return tuple(refused)


def roofline(
    target: Target, mesh: Any, flops: float, traffic: float, collectives: Sequence[Collective], moved: float = 0.0
) -> dict[str, float]:
    """Seconds at the chip's peaks: of products or of memory, whichever is longer, and after it of communication and of
    `moved` bytes to the host's memory while as many come back."""
    chip = target.chip
    inner = target.per_link
    talk = sum(c.sent / (chip.link if _span(c.axes, mesh) <= inner else chip.network) for c in collectives)
    work = {"products": flops / chip.flops, "memory": traffic / chip.bandwidth}
    longer = max(work, key=work.__getitem__)
    return {longer: work[longer], "communication": talk} | ({"host": moved / chip.host} if moved else {})


def _span(axes: Sequence[str], mesh: Any) -> int:
    """Consecutive devices that hold a whole group along these axes; the last axis of the mesh is the innermost."""
    names = list(mesh.shape)
    outermost = min((names.index(axis) for axis in axes), default=len(names))
    return math.prod(mesh.shape[name] for name in names[outermost:])


def _items(sizes: Mapping[str, int]) -> tuple[Item, ...]:
    """Those that are not empty."""
    return tuple(Item(name, size) for name, size in sizes.items() if size)


def _shared_out(memory: Memory, made: dict[str, int], inside: str) -> dict[str, int]:
    """The program's memory in parts that add up to its peak."""
    arguments = sum(size for name, size in made.items() if name != inside)
    beside = memory.arguments + memory.results - memory.aliased - arguments
    return made | {
        "batch and results": max(0, beside),
        "activations and other temporaries": max(0, memory.temporaries - made.get(inside, 0)),
    }


def _reason(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if "hbm" in line.lower() or "memory" in line.lower()]
    return (lines or [error.strip()])[0][:300]
