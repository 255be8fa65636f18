"""What of a layer is kept for its backward pass (`model.remat`)."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxrl_post.models.config import ModelConfig
from sharding.memory import HOST

LAYER_INPUT = "layer_input"  # what `model.remat=full_offload` keeps


def as_input(x_BTD: jax.Array) -> jax.Array:
    """Told to be what enters a layer."""
    return checkpoint_name(x_BTD, LAYER_INPUT)


def remat(layer: Callable, config: ModelConfig) -> Callable:
    """The layer, computed again in the backward pass where that is asked for."""
    if config.remat == "none":
        return layer
    policies = jax.checkpoint_policies
    saveable = {
        "full": None,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "full_offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst=HOST,
        ),
        "dots_offload": policies.offload_dot_with_no_batch_dims("device", HOST),
    }[config.remat]
    # Inside a scan nothing can be shared with the forward pass; in a row of layers the compiler would do so.
    return jax.checkpoint(layer, policy=saveable, prevent_cse=not config.scan_layers)
