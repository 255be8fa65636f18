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
from jaxrl_post.loops.planned import Plan, compile_planned, planned_update, stand_in_network, state_bytes, wide_axes
from jaxrl_post.types_offline import Answer, Example
from sharding.memory import placed_bytes
from sharding.targets import Target


def plan_offline(config: OfflineConfig, target: Target, devices: Sequence[Any]) -> Plan:
    """Raises: ValueError for whatever of the recipe cannot be built or compiled, except for want of room."""
    job = stand_in_job(config, devices)
    learner, network = OfflineLearner(job), job.network
    state, held = learner.abstract_state(), {}
    if learner.needs_reference and not config.training.cache_reference:
        held["reference policy"] = state_bytes(state)["parameters"]
    on_host = {"optimizer": placed_bytes(state, on_host=True)}
    traced, gradients = learner.traced_update(), learner.abstract_gradients()
    update = planned_update("update", 1, traced, state, gradients, held, on_host, network, learner.shape.rows)
    program = compile_planned(update, target, network.mesh)
    return Plan(target, wide_axes(network.mesh), network.model.parameter_count(), "", (program,))


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
