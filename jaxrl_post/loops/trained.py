"""Parameters that a run trains: their optimizer, and where they, their moments and their gradients lie."""

from __future__ import annotations

import dataclasses

from jaxrl_post import config_optimizer
from jaxrl_post.loops.network import Network
from jaxrl_post.models.decoder import Params
from jaxrl_post.training.optimizer import Optimizer, make_optimizer
from jaxrl_post.training.state import (
    StateShardings,
    TrainState,
    abstract_gradients,
    init_state,
    restorable_state,
    state_shardings,
)
from sharding.placement import Tree


@dataclasses.dataclass(frozen=True)
class Trained:
    """Shapes, an optimizer and layouts; no weights."""

    abstract_params: Params
    optimizer: Optimizer
    shardings: StateShardings

    def start(self, params: Params) -> TrainState:
        """Fresh optimizer state around `params`, which it takes over (the first update donates them)."""
        return init_state(params, self.optimizer, self.shardings)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state: what to restore a checkpoint into."""
        return restorable_state(self.abstract_params, self.optimizer, self.shardings)

    def abstract_gradients(self) -> Params:
        """Shapes and shardings of what an update adds up."""
        return abstract_gradients(self.abstract_params, self.shardings)


def make_trained(
    network: Network,
    options: config_optimizer.Optimizer,
    steps: int,
    updates_per_step: int = 1,
    params: Params | None = None,
    axes: Tree | None = None,
) -> Trained:
    """The network's parameters, or `params` (abstract) with their logical `axes`, on its mesh.

    Steps and updates are those of `make_optimizer`. Raises: ValueError as `state_shardings`.
    """
    params, axes = network.abstract_params if params is None else params, network.axes if axes is None else axes
    optimizer = make_optimizer(options, steps, updates_per_step)
    shardings = state_shardings(params, axes, optimizer, network.mesh, network.stage, options.offload)
    return Trained(params, optimizer, shardings)
