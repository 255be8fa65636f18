"""The programs of a recipe for hardware that is not there: traced and compiled from shapes alone, then read.

Prompts are taken to be as long as they may be and every sample to run to its limit: the dearest step there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl_post.config import Config, LastNumberReward
from jaxrl_post.config_ppo import PPO
from jaxrl_post.loops.critic import Critic
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.network import check_positions
from jaxrl_post.loops.planned import (
    Plan,
    Planned,
    ProgramPlan,
    compile_planned,
    planned_update,
    stand_in_network,
    state_bytes,
    wide_axes,
    without_room,
)
from jaxrl_post.loops.planned_rollout import ROLLOUT_WEIGHTS, planned_rollout
from jaxrl_post.loops.planned_rows import longest_rows
from jaxrl_post.rewards.model import Setting
from jaxrl_post.rewards.reward import build_reward
from jaxrl_post.types import Prompt
from sharding.memory import placed_bytes
from sharding.rules import ROLLOUT
from sharding.targets import Target


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
        rollout, shape = planned_rollout(self._job, self._target, self._held_by_rollout(), self._on_host())
        planned = *rollout, self._update(), *self._critic_update()
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
            longest_rows(self._job, learner.shape),
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
            longest_rows(self._job, critic.shape),
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
