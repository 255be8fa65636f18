"""The programs of a recipe for hardware that is not there: traced and compiled from shapes alone, then read.

Prompts are taken to be as long as they may be and every sample to run to its limit: the dearest step there is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Traced

from jaxrl_post.config import Config, LastNumberReward
from jaxrl_post.config_ppo import PPO
from jaxrl_post.data.tokenizer import load_tokenizer
from jaxrl_post.loops.critic import Critic
from jaxrl_post.loops.gather import sample_options
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.network import build_network, check_positions
from jaxrl_post.models.zoo import resolve
from jaxrl_post.rewards.model import Setting
from jaxrl_post.rewards.reward import build_reward
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.schedule import EngineShape
from jaxrl_post.types import Prompt
from sharding.mesh import batch_shards
from sharding.placement import bytes_per_device, placed_shapes
from sharding.report import Collective, Memory, Program, count_flops, memory_of
from sharding.rules import ROLLOUT
from sharding.targets import Target

USABLE = 0.92  # of a device's memory; the rest is the runtime's own and what lies idle between arrays


@dataclasses.dataclass(frozen=True)
class Item:
    """Something on each device, in bytes, while one of the programs runs."""

    name: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """One program on each device: what lies there while it runs, its operations, communication and kernels.

    `runs` a step. `seconds` are those of one run at the chip's peaks, communication not overlapped: an estimate.
    `refused` is the compiler's reason where it found no room; nothing but `name` and `runs` is known then.
    """

    name: str
    runs: int
    items: tuple[Item, ...] = ()
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
    """A recipe on a target. `shape` says how a rollout is laid out."""

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
    def step_seconds(self) -> float:
        return sum(program.runs * sum(program.seconds.values()) for program in self.programs)


class Planner:
    """A recipe's programs on the devices of a target."""

    def __init__(self, config: Config, target: Target, devices: Sequence[Any]):
        """Raises: ValueError for whatever of the recipe cannot be built, before anything is compiled."""
        self._config, self._target = config, target
        self._job = stand_in_job(config, devices)
        self._learner = Learner(self._job)
        self._critic = Critic(self._job, config.algorithm) if isinstance(config.algorithm, PPO) else None

    def plan(self) -> Plan:
        """Compiles every program. Raises: ValueError when one cannot be compiled, for another reason than room."""
        network = self._job.network
        rollout, shape = self._rollout()
        programs = [rollout, self._update()]
        return Plan(
            self._target,
            {axis: size for axis, size in network.mesh.shape.items() if size > 1},
            network.model.parameter_count(),
            shape.describe(),
            tuple(programs),
        )

    def _rollout(self) -> tuple[ProgramPlan, EngineShape]:
        job, config, model = self._job, self._config, self._job.network.model
        network, mesh = job.network, job.network.mesh
        sampler = Sampler(network.graphdef, model, mesh, job.stop_ids, device_memory=self._target.chip.memory)
        shardings, held = network.shardings(ROLLOUT), self._held()
        shares = network.shardings() == shardings and model.param_dtype == model.dtype
        cast = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(model.dtype)), network.abstract_params)
        weights = bytes_per_device(cast, shardings).per_device
        shape, traced = sampler.traced(
            placed_shapes(cast, shardings),
            config.data.prompts_per_step,
            dataclasses.replace(sample_options(config, job.tokenizer), stop=()),  # a table of a few kilobytes
            job.prompt_width,
        )
        cache = _cache_bytes(shape, model, mesh.shape["tensor"])
        if shares:
            held["parameters"] = 0
        made = {"weights in the rollout's layout": weights, "cache": cache[0]}
        trips = rollout_trips(shape, math.ceil(config.data.prompts_per_step / batch_shards(mesh)))
        steps = sum(trips[1:])
        traffic = steps * weights + _cache_traffic(shape, trips, cache)
        return self._compiled("rollout", 1, traced, held, made, "cache", trips, traffic), shape

    def _update(self) -> ProgramPlan:
        network, algorithm = self._job.network, self._config.algorithm
        held = self._held()
        gradients = bytes_per_device(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), network.abstract_params),
            network.shardings(),
        ).per_device
        made = {name: held.pop(name) for name in ("parameters", "optimizer")} | {"sums of gradients": gradients}
        micro_batches = self._learner.shape.micro_batches
        width = jnp.dtype(network.model.dtype).itemsize
        whole = network.model.parameter_count() * width / network.mesh.shape["tensor"]
        traffic = 3 * micro_batches * whole + 2 * (made["parameters"] + made["optimizer"] + gradients)
        return self._compiled(
            "update",
            algorithm.epochs * algorithm.mini_batches,
            self._learner.traced_update(),
            held,
            made,
            "sums of gradients",
            [micro_batches],
            traffic,
        )

    def _held(self) -> dict[str, int]:
        """What lies on a device all the time."""
        state = self._learner.abstract_state()
        on_device = lambda tree: bytes_per_device(tree, jax.tree.map(lambda x: x.sharding, tree)).per_device
        held = {"parameters": on_device(state.params), "optimizer": on_device(state.opt_state)}
        if self._learner.needs_reference:
            held["reference policy"] = held["parameters"]
        if self._critic:
            held["critic"] = on_device(self._critic.abstract_arrays())
        return held

    def _compiled(
        self,
        name: str,
        runs: int,
        traced: Traced,
        held: dict[str, int],
        made: dict[str, int],
        inside: str,
        trips: list[int],
        traffic: float,
    ) -> ProgramPlan:
        """`held` is no part of the program, `made` is; of that `inside` is one of its temporaries."""
        begun = time.monotonic()
        try:
            compiled = traced.lower().compile(compiler_options=self._target.compiler_options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise ValueError(f"the {name} does not compile for {self._target.name}: {error}") from error
            return ProgramPlan(name, runs, refused=_reason(str(error)))
        took = time.monotonic() - begun
        memory, mesh = memory_of(compiled), self._job.network.mesh
        program = Program(compiled.as_text(), trips)
        collectives = tuple(program.collectives(mesh))
        flops = count_flops(traced.jaxpr, trips) / mesh.size
        return ProgramPlan(
            name=name,
            runs=runs,
            items=tuple(Item(*pair) for pair in (held | _shared_out(memory, made, inside)).items() if pair[1]),
            flops=flops,
            traffic=traffic,
            collectives=collectives,
            kernels=program.kernels(),
            seconds=roofline(self._target, mesh, flops, traffic, collectives),
            compile_seconds=took,
        )


def stand_in_job(config: Config, devices: Sequence[Any]) -> Job:
    """A run's job on `devices` without its weights, tokenizer and data: one prompt, as long as prompts may be.

    Raises: ValueError for a model without a readable config.json, sizes that do not divide, and teachers.
    """
    if config.algorithm.taught is not None:
        raise ValueError(f"algorithm.kind={config.algorithm.kind} has teachers, which cannot be planned yet")
    folder = None if config.model.path is None else resolve(config.model.path)
    tokenizer = load_tokenizer(None)
    network = build_network(config, folder, tokenizer, devices)
    network.shardings(ROLLOUT)
    check_positions(
        network,
        {
            "data.max_prompt_tokens": config.data.max_prompt_tokens,
            "rollout.max_new_tokens": config.rollout.max_new_tokens,
        },
    )
    longest = Prompt((0,) * config.data.max_prompt_tokens, "", {})
    setting = Setting(config.mesh, tokenizer, network.model.vocab_size, len(longest.ids), 1)
    reward = build_reward(LastNumberReward(), setting)
    return Job(config, network, tokenizer, reward, [longest], [], "planned")


def rollout_trips(shape: EngineShape, prompts: int) -> list[int]:
    """How often each loop of a rollout runs when every sample runs to its limit: the filling, the decoding inside of it
    where requests wait for slots, and the tiers of each phase."""
    requests = prompts * shape.group
    fills = math.ceil(requests / shape.refill) * shape.pieces
    ends = [0, *shape.phases[0][1]]
    drained = [0 for _, tiers in shape.phases[1:] for _ in tiers]
    last = [after - before for before, after in itertools.pairwise(ends)]
    if shape.slots == requests:
        return [fills, *last, *drained]
    waves = math.ceil(requests / shape.slots)
    return [fills, math.ceil((waves - 1) * shape.max_new / fills), *last, *drained]


def roofline(
    target: Target, mesh: Any, flops: float, traffic: float, collectives: Sequence[Collective]
) -> dict[str, float]:
    """Seconds at the chip's peaks: of products or of memory, whichever is longer, and of communication after it."""
    chip = target.chip
    inner = target.per_link
    talk = sum(c.sent / (chip.link if _span(c.axes, mesh) <= inner else chip.network) for c in collectives)
    work = {"products": flops / chip.flops, "memory": traffic / chip.bandwidth}
    longer = max(work, key=work.__getitem__)
    return {longer: work[longer], "communication": talk}


def _span(axes: Sequence[str], mesh: Any) -> int:
    """Consecutive devices that hold a whole group along these axes; the last axis of the mesh is the innermost."""
    names = list(mesh.shape)
    outermost = min((names.index(axis) for axis in axes), default=len(names))
    return math.prod(mesh.shape[name] for name in names[outermost:])


def _cache_bytes(shape: EngineShape, model: Any, tensor: int) -> tuple[int, int]:
    """Of prompts and responses together, and of responses alone, on a device."""
    column = 2 * model.layers * model.kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize // tensor
    responses = column * shape.slots * shape.max_new
    return column * shape.prompt_rows * shape.pieces * shape.piece + responses, responses


def _cache_traffic(shape: EngineShape, trips: list[int], cache: tuple[int, int]) -> float:
    """Bytes read of the cache by all decode steps: prompts whole, responses up to the end of the tier."""
    ends = shape.phases[0][1]
    inner = len(trips) - 1 - sum(len(tiers) for _, tiers in shape.phases)
    steps = [*([trips[0] * trips[1]] if inner else []), *trips[1 + inner :]]
    reads = [*([shape.max_new] if inner else []), *ends]
    return sum(n * (cache[0] - cache[1] + cache[1] * end / shape.max_new) for n, end in zip(steps, reads, strict=False))


def _shared_out(memory: Memory, made: dict[str, int], inside: str) -> dict[str, int]:
    """The program's memory in parts that add up to its peak."""
    arguments = sum(size for name, size in made.items() if name != inside)
    beside = memory.arguments + memory.results - memory.aliased - arguments
    return made | {
        "batch and results": max(0, beside),
        "activations and other temporaries": max(0, memory.temporaries - made[inside]),
    }


def _reason(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if "hbm" in line.lower() or "memory" in line.lower()]
    return (lines or [error.strip()])[0][:300]
