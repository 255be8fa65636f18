"""What a run says of itself before its first step."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.loops.network import Network
from jaxrl_post.observe.sizes import size_text
from jaxrl_post.training.packing import PackShape
from jaxrl_post.training.state import TrainState
from sharding.memory import placed_bytes


def introduction(
    config: Config | OfflineConfig, network: Network, state: TrainState, shape: PackShape, data: str, done: int
) -> Iterator[str]:
    """Method, model, devices and memory; the `data` of a step and the rows it is packed into; where it starts."""
    model, mesh = network.model, network.mesh
    axes = " × ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    reached = f" by {model.moe.dispatch} dispatch" if model.moe and mesh.shape["expert"] > 1 else ""
    experts = f"{model.moe.backend} experts{reached}, " if model.moe else ""
    held, on_host = placed_bytes(state), placed_bytes(state, on_host=True)
    yield (
        f"{config.algorithm.kind} on {model.family} {model.parameter_count() / 1e6:.1f}M parameters, {model.dtype} "
        f"compute, {model.attention} attention, {experts}on {axes} ({jax.devices()[0].device_kind}); weights and "
        f"optimizer {size_text(held)} a device{f', {size_text(on_host)} in its host' if on_host else ''}"
    )
    yield (
        f"{data}; update rows {shape.rows} × {shape.length} tokens, up to {shape.micro_batches} "
        f"micro-batch{'es' if shape.micro_batches > 1 else ''}"
    )
    yield f"{'resuming after step ' + str(done) if done else 'starting'}; outputs in {config.run_dir}"
