"""Length shaping of the reward.

Legend: N samples.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def soft_penalty(lengths_N: jax.Array, *, max_length: int, buffer: int, factor: float = 1.0) -> jax.Array:
    """DAPO's soft overlong punishment (arXiv:2503.14476), added to the reward; float32 [N] in [−factor, 0].

    0 up to max_length − buffer tokens, then linear down to −factor at max_length. The reference run uses 20480, 4096.
    Raises ValueError unless 0 < buffer ≤ max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must lie in (0, max_length={max_length}]")
    excess_N = (jnp.asarray(lengths_N, jnp.float32) - (max_length - buffer)) / buffer
    return -factor * jnp.clip(excess_N, 0.0, 1.0)
