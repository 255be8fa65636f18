"""The programs of a recipe for hardware that is not there: traced and compiled from shapes alone, then read.

Prompts are taken to be as long as they may be and every sample to run to its limit: the dearest step there is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxrl_post.config import Config, LastNumberReward
from jaxrl_post.config_ppo import PPO
from jaxrl_post.loops.critic import Critic
from jaxrl_post.loops.gather import sample_options
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.network import check_positions
from jaxrl_post.loops.planned import (
    Plan,
    Planned,
    ProgramPlan,
    compile_planned,
    planned_update,
    sent_share,
    stand_in_network,
    state_bytes,
    wide_axes,
    without_room,
)
from jaxrl_post.rewards.model import Setting
from jaxrl_post.rewards.reward import build_reward
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.schedule import EngineShape
from jaxrl_post.types import Prompt
from sharding.memory import placed_bytes
from sharding.mesh import batch_shards
from sharding.rules import ROLLOUT
from sharding.targets import Target

ROLLOUT_WEIGHTS = "weights in the rollout's layout"


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
        rollout, shape = self._rollout()
        planned = rollout, self._update(), *self._critic_update()
        mesh = self._job.network.mesh
        return self._plan(shape.describe(), [compile_planned(one, self._target, mesh) for one in planned])

    def without_room(self) -> Plan | None:
        """A plan that compiled nothing, where weights and what belongs to them leave no room."""
        gradients = {"sums of gradients": placed_bytes(self._learner.trained.abstract_gradients())}
        rollout = self._held_by_rollout() | {ROLLOUT_WEIGHTS: placed_bytes(self._job.network.rollout_shapes())}
        refused = without_room(self._target, {"rollout": rollout, "update": self._held() | gradients})
        return self._plan("", refused) if refused else None

    def _plan(self, shape: str, programs: Sequence[ProgramPlan]) -> Plan:
        network = self._job.network
        return Plan(self._target, wide_axes(network.mesh), network.model.parameter_count(), shape, tuple(programs))

    def _rollout(self) -> tuple[Planned, EngineShape]:
        job, config, model = self._job, self._config, self._job.network.model
        network, mesh = job.network, job.network.mesh
        sampler = Sampler(network.graphdef, model, mesh, job.stop_ids, device_memory=self._target.chip.memory)
        params = network.rollout_shapes()
        weights = placed_bytes(params)
        shape, traced = sampler.traced(
            params,
            config.data.prompts_per_step,
            dataclasses.replace(sample_options(config, job.tokenizer), stop=()),  # a table of a few kilobytes
            job.prompt_width,
        )
        cache = _cache_bytes(shape, model, mesh.shape["tensor"])
        made = {ROLLOUT_WEIGHTS: weights, "cache": cache[0]}
        trips = rollout_trips(shape, math.ceil(config.data.prompts_per_step / batch_shards(mesh)))
        steps = sum(trips[1:])
        traffic = steps * weights + _cache_traffic(shape, trips, cache)
        held = self._held_by_rollout()
        filled = sent_share(network)
        return Planned("rollout", 1, traced, held, made, "cache", trips, traffic, self._on_host(), filled=filled), shape

    def _update(self) -> Planned:
        learner, held = self._learner, self._held()
        state = learner.trained.abstract_state()
        for name in state_bytes(state):
            del held[name]
        return planned_update(
            "update",
            self._updates,
            learner.traced_update(),
            state,
            learner.trained.abstract_gradients(),
            held,
            self._on_host(),
            self._job.network,
            learner.shape,
        )

    def _critic_update(self) -> list[Planned]:
        """PPO's; beside it lies the policy, which a critic without a decoder of its own reads."""
        if self._critic is None:
            return []
        held, critic = self._held(), self._critic
        del held["critic"]
        reads = {} if critic.owns_decoder else {"policy": held["parameters"]}
        names = {"parameters": "policy", "optimizer": "policy's optimizer"}
        held = {names.get(name, name): size for name, size in held.items() if name != "parameters" or not reads}
        update = planned_update(
            "critic's update",
            self._updates,
            critic.traced_update(),
            critic.trained.abstract_state(),
            critic.trained.abstract_gradients(),
            held,
            self._on_host(),
            self._job.network,
            critic.shape,
            reads,
        )
        return [update]

    @property
    def _updates(self) -> int:
        return self._config.algorithm.epochs * self._config.algorithm.mini_batches

    def _held(self) -> dict[str, int]:
        """What lies on a device all the time."""
        held = state_bytes(self._learner.trained.abstract_state())
        if self._learner.needs_reference:
            held["reference policy"] = held["parameters"]
        if self._critic:
            held["critic"] = placed_bytes(self._critic.abstract_arrays())
        return held

    def _held_by_rollout(self) -> dict[str, int]:
        """What lies there beside a rollout and its weights."""
        return self._held() | ({"parameters": 0} if self._job.network.shares_weights else {})

    def _on_host(self) -> dict[str, int]:
        """What lies in the host's memory all the time, for each device."""
        on_host = {"optimizer": placed_bytes(self._learner.trained.abstract_state(), on_host=True)}
        if self._critic:
            on_host["critic's optimizer"] = placed_bytes(self._critic.trained.abstract_state(), on_host=True)
        return on_host


def stand_in_job(config: Config, devices: Sequence[Any]) -> Job:
    """A run's job on `devices` without its weights, tokenizer and data: one prompt, as long as prompts may be.

    Raises: ValueError as `stand_in_network`.
    """
    network, tokenizer = stand_in_network(config, devices, config.algorithm.taught is not None)
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


def _cache_bytes(shape: EngineShape, model: Any, tensor: int) -> tuple[int, int]:
    """Of prompts and responses together, and of responses alone, on a device."""
    column = 2 * model.layers * model.kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize // tensor
    responses = column * shape.slots * shape.max_new
    return column * shape.prompt_rows * shape.pieces * shape.piece + responses, responses


def _cache_traffic(shape: EngineShape, trips: list[int], cache: tuple[int, int]) -> float:
    """Bytes read of the cache by all decode steps: prompts whole, responses up to the end of the tier, or by a kernel
    those there are, half of them on average."""
    ends = shape.phases[0][1]
    inner = len(trips) - 1 - sum(len(tiers) for _, tiers in shape.phases)
    steps = [*([trips[0] * trips[1]] if inner else []), *trips[1 + inner :]]
    reads = [*([shape.max_new] if inner else []), *ends]
    share = 1.0 if shape.attention == "xla" else 0.5
    whole = cache[1] * share / shape.max_new
    return sum(n * (cache[0] - cache[1] + whole * end) for n, end in zip(steps, reads, strict=False))
