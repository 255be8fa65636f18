"""The update of an offline recipe for hardware that is not there, from shapes alone.

Every example is taken to be as long as it may be. Of data.max_tokens half is prompt, so a pair takes one and a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.config_teachers import Taught
from jaxrl_post.data.preferences import Report, pair, reader
from jaxrl_post.loops.network import check_positions
from jaxrl_post.loops.offline_job import OfflineJob
from jaxrl_post.loops.offline_learner import OfflineLearner
from jaxrl_post.loops.planned import (
    Plan,
    ProgramPlan,
    compile_planned,
    planned_update,
    stand_in_network,
    state_bytes,
    wide_axes,
    without_room,
)
from jaxrl_post.loops.planned_rows import example_rows
from jaxrl_post.types_offline import Answer, Example
from sharding.memory import placed_bytes
from sharding.targets import Target


class OfflinePlanner:
    """The update of a recipe that trains from files, on the devices of a target."""

    def __init__(self, config: OfflineConfig, target: Target, devices: Sequence[Any]):
        """Raises: ValueError for whatever of the recipe cannot be built, before anything is compiled."""
        self._target, job = target, stand_in_job(config, devices)
        self._network, self._learner = job.network, OfflineLearner(job)
        self._examples = job.examples * config.data.examples_per_step
        self._held = {}
        if self._learner.needs_reference and not config.training.cache_reference:
            self._held["reference policy"] = state_bytes(self._learner.trained.abstract_state())["parameters"]

    def without_room(self) -> Plan | None:
        """A plan that compiled nothing, where weights and what belongs to them leave no room."""
        state = state_bytes(self._learner.trained.abstract_state())
        gradients = {"sums of gradients": placed_bytes(self._learner.trained.abstract_gradients())}
        refused = without_room(self._target, {"update": state | gradients | self._held})
        return self._plan(refused) if refused else None

    def plan(self) -> Plan:
        """Compiles the update. Raises: ValueError when it cannot be compiled, for another reason than room."""
        learner, state = self._learner, self._learner.trained.abstract_state()
        update = planned_update(
            "update",
            1,
            learner.traced_update(),
            state,
            learner.trained.abstract_gradients(),
            self._held,
            {"optimizer": placed_bytes(state, on_host=True)},
            self._network,
            learner.shape.rows,
            example_rows(self._examples, learner.shape),
        )
        return self._plan((compile_planned(update, self._target, self._network.mesh),))

    def _plan(self, programs: tuple[ProgramPlan, ...]) -> Plan:
        return Plan(self._target, wide_axes(self._network.mesh), self._network.model.parameter_count(), "", programs)


def stand_in_job(config: OfflineConfig, devices: Sequence[Any]) -> OfflineJob:
    """A run's job on `devices` without its weights, tokenizer and data: one example, as long as examples may be.

    Raises: ValueError as `stand_in_network`.
    """
    network, tokenizer = stand_in_network(config, devices, isinstance(config.algorithm, Taught))
    limit = config.data.max_tokens
    check_positions(network, {"data.max_tokens": limit})
    answer = Answer((0,) * (limit - limit // 2), (True,) * (limit - limit // 2))
    count = 2 if reader(config.algorithm.kind) is pair else 1
    longest = Example((0,) * (limit // 2), (answer,) * count)
    return OfflineJob(config, network, tokenizer, [longest], [], Report(0, 0, 0))
