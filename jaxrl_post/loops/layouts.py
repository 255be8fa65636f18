"""Whether the weights that are sampled from are those that are trained."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.models.decoder import Params
from sharding.placement import named_leaves
from sharding.processes import fetch


def check_layouts(trained: Params, sampled: Params) -> None:
    """Compare the weights of the two layouts number by number on the host, after the cast that sampling asks for.

    Raises: ValueError naming the first array that differs.
    """
    for (name, ours), theirs in zip(named_leaves(trained), jax.tree.leaves(sampled), strict=True):
        wanted, found = (np.asarray(fetch(x)) for x in (jnp.asarray(ours, theirs.dtype), theirs))
        differ = (wanted != found) & ~((wanted != wanted) & (found != found))
        if differ.any():
            raise ValueError(
                f"debug.check_layouts: {name} {wanted.shape} differs between the training layout "
                f"({ours.sharding.spec}) and the rollout layout ({theirs.sharding.spec}) in {int(differ.sum())} of "
                f"{differ.size} numbers, first at {np.argwhere(differ)[0].tolist()}: this is a "
                "fault of the reshard and not of the recipe"
            )
