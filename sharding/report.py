"""What a compiled program takes on each device: memory, communication by kind and mesh axis, kernels. Knows no model.

Read from the compiler's own accounts and its optimised text, in which shapes are those of one device. An instruction in
a loop counts as often as the loop runs: as often as the text says, or, where the data decide, as the caller does.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

WIDTHS = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1}
RAGGED = "ragged-all-to-all"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", RAGGED)
# Bytes that a device sends, as a share of the larger of operand and result, among n devices.
SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "collective-permute": lambda n: 1.0,
}
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'known_trip_count"?:\s*\{"n":\s*"(\d+)"')
KERNEL = re.compile(r'custom_call_target="([^"]*)"')
OWN_KERNEL = re.compile(r'custom_call_target=.*op_name="[^"]*?(\w+)\)*/pallas_call"')
CHAIN = re.compile(r'channel_id=(\d+),.*chain_id="(\d+)"')
BELOW = re.compile(r"%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device: what a program is handed, what it makes, the part of that it writes over what it was handed,
    and what it needs in between; `host_temporaries` of that in the memory of its host."""

    arguments: int
    results: int
    aliased: int
    temporaries: int
    host_temporaries: int = 0

    @property
    def peak(self) -> int:
        return self.arguments + self.results - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of communication among the devices along some axes of the mesh: how often, and bytes that a device
    holds of it and sends, in all; of a ragged one the bytes there is room for, and the share of them that is sent."""

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    sent: float


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shapes: str
    op: str
    rest: str

    @property
    def called(self) -> list[str]:
        branches = BRANCHES.search(self.rest)
        listed = [name.strip().lstrip("%") for name in branches[1].split(",")] if branches else []
        return CALLED.findall(self.rest) + listed


class Program:
    """The optimised text of a program, and how often each of its computations runs.

    `trips` are those of the outermost loops whose number the data decide and which hold another loop, in order; other
    loops of that sort run once. `filled` is the share of a ragged array that is sent: the data decide it, and what the
    text says is a bound.
    """

    def __init__(self, text: str, trips: Sequence[int] = (), filled: float = 1.0):
        self._filled = filled
        self._computations, self._entry = _computations(text)
        self._runs: collections.Counter[str] = collections.Counter()
        self._trips = iter(trips)
        self._walk(self._entry, 1)

    def _walk(self, name: str, runs: int) -> None:
        self._runs[name] += runs
        for instruction in self._computations.get(name, ()):
            times = self._times(instruction) if instruction.op == "while" else 1
            for called in instruction.called:
                if times and called in self._computations:
                    self._walk(called, runs * times)

    def _times(self, loop: Instruction) -> int:
        if (known := self._known_trips(loop)) is not None:
            return known
        return next(self._trips, 1) if any(map(self._has_loop, loop.called)) else 1

    def _known_trips(self, loop: Instruction) -> int | None:
        """As noted, or, as TPUs' compiler notes none, the constant below which the loop's counter must be."""
        if noted := TRIPS.search(loop.rest):
            return int(noted[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
        inside = self._computations.get(condition[1] if condition else "", [])
        below = BELOW.match(inside[-1].rest) if inside and inside[-1].op == "compare" else None
        if below is None:
            return None
        limits = [i for i in inside if i.name == below[1] and i.op == "constant"]
        return int(limits[0].rest.partition(")")[0]) if limits else None

    def _has_loop(self, name: str) -> bool:
        inside = self._computations.get(name, ())
        return any(i.op == "while" or any(map(self._has_loop, i.called)) for i in inside)

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """Each that runs at all, and how often."""
        for name, runs in self._runs.items():
            for instruction in self._computations[name]:
                yield instruction, runs

    def each_collective(self, mesh: Any) -> Iterator[Collective]:
        """One for each instruction; TPUs' compiler cuts some into a chain, of which each link names the whole."""
        chains: set[tuple[str, ...]] = set()
        for instruction, runs in self.instructions():
            kind = instruction.op.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            if chain := CHAIN.search(instruction.rest):
                if chain.groups() in chains:
                    continue
                chains.add(chain.groups())
            groups = _groups(instruction.rest, mesh.size)
            if not (axes := _axes(groups, mesh)):
                continue
            n = len(groups[0])
            size = _size(instruction, n)
            sent = size * SENT.get(kind, lambda n: (n - 1) / n)(n) * (self._filled if kind == RAGGED else 1.0)
            yield Collective(kind, axes, runs, runs * size, runs * sent)

    def collectives(self, mesh: Any) -> list[Collective]:
        """By kind and axes, the largest first."""
        found: dict[tuple[str, tuple[str, ...]], Collective] = {}
        for one in self.each_collective(mesh):
            so_far = found.get((one.kind, one.axes), dataclasses.replace(one, count=0, bytes=0, sent=0.0))
            found[one.kind, one.axes] = dataclasses.replace(
                one, count=so_far.count + one.count, bytes=so_far.bytes + one.bytes, sent=so_far.sent + one.sent
            )
        return sorted(found.values(), key=lambda c: -c.sent)

    def kernels(self) -> dict[str, int]:
        """Custom calls by target, kernels written in Pallas by their own name: how many instructions of each."""
        named = (OWN_KERNEL.search(i.rest) or KERNEL.search(i.rest) for i, _ in self.instructions())
        return dict(collections.Counter(found[1] for found in named if found).most_common())


def memory_of(compiled: Any) -> Memory:
    """Of what `jax.stages.Lowered.compile` returns."""
    m = compiled.memory_analysis()
    return Memory(
        m.argument_size_in_bytes,
        m.output_size_in_bytes,
        m.alias_size_in_bytes,
        m.temp_size_in_bytes,
        m.host_temp_size_in_bytes,
    )


def count_flops(jaxpr: Any, trips: Sequence[int] = (), shares: Mapping[str, float] = MappingProxyType({})) -> float:
    """Floating-point operations of the matrix products of a traced program on all devices together, two for each
    multiply-add; `trips` as for `Program`. Branches count as the dearest of them, kernels as they say of themselves:
    where the data decide, that is a bound, and `shares` has by a kernel's name how much of it is done."""
    return _flops(jaxpr, iter(trips), shares)


def _flops(jaxpr: Any, trips: Iterator[int], shares: Mapping[str, float]) -> float:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_equation_flops(equation, trips, shares) for equation in jaxpr.eqns)


def _equation_flops(equation: Any, trips: Iterator[int], shares: Mapping[str, float]) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    if name.startswith("ragged_dot"):
        rows, inner = equation.invars[0].aval.shape[-2:]
        return 2.0 * rows * inner * equation.invars[1].aval.shape[-1]
    if name == "pallas_call":
        share = shares.get(params["name"], 1.0)
        return share * params["cost_estimate"].flops if params["cost_estimate"] else 0.0
    if name == "scan":
        return params["length"] * _flops(params["jaxpr"], trips, shares)
    if name == "while":
        body = params["body_jaxpr"]
        times = next(trips, 1) if _has_loop(body) else 1
        return times * _flops(body, trips, shares)
    if name == "cond":
        return max(_flops(branch, trips, shares) for branch in params["branches"])
    inner = sum(_flops(x, trips, shares) for x in _jaxprs(params))
    if name == "shard_map":
        return inner * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return inner


def _jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """Those that an equation calls once."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            yield params[key]


def _has_loop(jaxpr: Any) -> bool:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return any(e.primitive.name in ("scan", "while") or any(map(_has_loop, _jaxprs(e.params))) for e in jaxpr.eqns)


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Instructions by computation, and the name of the one that is run."""
    computations: dict[str, list[Instruction]] = {}
    name = entry = ""
    for line in text.splitlines():
        if line.endswith("{") and (found := re.match(r"^(ENTRY )?%?([\w.\-]+) \(", line)):
            name = found[2]
            entry = name if found[1] else entry
            computations[name] = []
        elif name and (found := INSTRUCTION.match(line)):
            computations[name].append(Instruction(*found.groups()))
    return computations, entry


def _shapes(text: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """Dimensions and bytes an element of each array in a type."""
    for kind, dims in re.findall(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", text):
        width = WIDTHS.get(kind) or int(re.sub(r"\D", "", kind) or 8) // 8 or 1
        yield tuple(int(d) for d in dims.split(",") if d), width


def _size(instruction: Instruction, n: int) -> int:
    """Bytes of what n devices have together of a reduction's operand or another's result; several arrays may be one
    instruction's, and what starts one that runs beside others names its operands before its results."""
    sizes = [math.prod(shape) * width for shape, width in _shapes(instruction.shapes)]
    match instruction.op:
        case "collective-permute-start":
            return max(sizes)
        case "all-gather-start":
            return sum(sizes) * n // (n + 1)
        case "ragged-all-to-all-start":
            return sizes[-1]
        case "reduce-scatter":
            return sum(sizes) * n
    return sum(sizes)


def element_counts(shapes: str) -> list[int]:
    """Of each array in a type."""
    return [math.prod(shape) for shape, _ in _shapes(shapes)]


def _groups(text: str, devices: int) -> np.ndarray:
    """Devices that talk to each other, [groups, n], by their place in the mesh; pairs of a permute.

    Groups are written out, or as the axes of a grid of devices: `[4,2]<=[2,4]T(1,0)`, or
    `mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x','y':(1)2}`, where the last is a part of an axis.
    """
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _numbered(found[2], found[3]).reshape(_ints(found[1]))
    if found := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", text
    ):
        return _grid_groups(*found.groups())
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", text):
        return np.array([_ints(group) for group in re.findall(r"\{([\d, ]+)\}", found[1])])
    if "replica_groups=" in text and "replica_groups={}" not in text:
        raise ValueError(f"these groups of devices cannot be read: {text[:200]}")
    return np.arange(devices)[None]


def _grid_groups(grid: str, order: str | None, turned: str | None, axes: str) -> np.ndarray:
    """The groups along some axes of a named grid."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", grid)}
    ids = _numbered(order, turned) if order else np.arange(math.prod(sizes.values()))
    shape: list[int] = []
    inside: list[int] = []
    # Each axis is in three parts: before, of and after what is named of it.
    named = {name: (int(before or 1), int(size or 0)) for name, before, size in _PARTS.findall(axes)}
    for name, size in sizes.items():
        before, own = named.get(name, (size, 1))
        own = own or size // before
        inside.append(len(shape) + 1)
        shape += [before, own, size // (before * own)]
    places = np.moveaxis(ids.reshape(shape), inside, range(-len(inside), 0))
    return places.reshape(-1, math.prod(places.shape[-len(inside) :]))


_PARTS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


def _numbered(order: str, turned: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_ints(order))).reshape(_ints(order))
    return ids.transpose(_ints(turned)) if turned else ids


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _axes(groups: np.ndarray, mesh: Any) -> tuple[str, ...]:
    """The axes of the mesh along which the members of a group differ."""
    places = np.stack(np.unravel_index(groups, tuple(mesh.shape.values())))  # [axes, groups, n]
    differ = (places != places[..., :1]).any(axis=(1, 2))
    return tuple(axis for axis, moves in zip(mesh.shape, differ, strict=True) if moves)
