"""Rotary position embedding (arXiv:2104.09864), half-split layout, with Llama 3.1's frequency scaling.

B batch, T time, H heads, N per-head width. Frequencies come from float64, angles and phases are float32 whatever the
model's dtype: bfloat16 would round position 257 to 256.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.models.config import Llama3Rope, ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each of the N/2 pairs, float32 [N/2]."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequency = config.rope_theta**-exponent
    if config.rope_scaling is not None:
        frequency = _llama3(frequency, config.rope_scaling)
    return frequency.astype(np.float32)


def _llama3(frequency: np.ndarray, scaling: Llama3Rope) -> np.ndarray:
    turns = scaling.original_max_positions * frequency / (2 * np.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return frequency * (keep + (1 - keep) / scaling.factor)


def phases(config: ModelConfig, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [B, T, 1, N/2], for integer positions."""
    angle_BTN = positions_BT.astype(jnp.float32)[..., None] * jnp.asarray(inverse_frequencies(config))[None, None]
    return jnp.cos(angle_BTN)[:, :, None], jnp.sin(angle_BTN)[:, :, None]


def rotate(x_BTHN: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pairs (n, n + N/2); computed in float32, returned in x's dtype."""
    a, b = jnp.split(x_BTHN.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHN.dtype)
