"""One layer of a decoder around its attention: weights, what attention reads, and what follows it.

B batch, T time, D width, H query heads, K key/value heads, N per-head width, F mlp width, L layers, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxrl_post.models import moe, rope
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.moe import Routing
from jaxrl_post.models.placement import Placement
from jaxrl_post.models.product import product

Layer = dict[str, jax.Array]
MLP = Callable[[Layer, jax.Array, jax.Array | None], tuple[jax.Array, Routing | None]]


class Stack(nnx.Module):
    """The stacked weights of all layers, each with a leading L."""

    def __init__(self, config: ModelConfig, weight: Callable[..., nnx.Param]):
        D, H, K, N = config.hidden_size, config.heads, config.kv_heads, config.head_dim
        F, L = config.intermediate_size, config.layers
        one, zero = 1.0, 0.0
        self.attention_norm = weight((L, D), ("layers", None), one)
        self.q = weight((L, D, H, N), ("layers", "embed", "heads", "head_dim"))
        self.k = weight((L, D, K, N), ("layers", "embed", "kv_heads", "head_dim"))
        self.v = weight((L, D, K, N), ("layers", "embed", "kv_heads", "head_dim"))
        self.o = weight((L, H, N, D), ("layers", "heads", "head_dim", "embed"))
        if config.qkv_bias:
            self.q_bias = weight((L, H, N), ("layers", "heads", "head_dim"), zero)
            self.k_bias = weight((L, K, N), ("layers", "kv_heads", "head_dim"), zero)
            self.v_bias = weight((L, K, N), ("layers", "kv_heads", "head_dim"), zero)
        if config.qk_norm:
            self.q_norm = weight((L, N), ("layers", "head_dim"), one)
            self.k_norm = weight((L, N), ("layers", "head_dim"), one)
        self.mlp_norm = weight((L, D), ("layers", None), one)
        if config.moe:
            for name, shape in moe.shapes(config.moe, D).items():
                setattr(self, name, weight((L, *shape), ("layers", *moe.AXES[name])))
        else:
            self.gate = weight((L, D, F), ("layers", "embed", "mlp"))
            self.up = weight((L, D, F), ("layers", "embed", "mlp"))
            self.down = weight((L, F, D), ("layers", "mlp", "embed"))


def projected(
    config: ModelConfig, w: Layer, x_BTD: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, T, H, N] and k, v [B, T, K, N] of what enters a layer, q and k rotated."""
    h = rms_norm(x_BTD, w["attention_norm"], config.norm_eps)
    q, k, v = (product(h, w[name]) for name in "qkv")
    if config.qkv_bias:
        q, k, v = (y + w[f"{name}_bias"].astype(h.dtype)[None, None] for y, name in zip((q, k, v), "qkv", strict=True))
    if config.qk_norm:
        q, k = rms_norm(q, w["q_norm"], config.norm_eps), rms_norm(k, w["k_norm"], config.norm_eps)
    return rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v


def finished(
    config: ModelConfig, w: Layer, x_BTD: jax.Array, attended_BTHN: jax.Array, mlp: MLP, choices_BTk: jax.Array | None
) -> tuple[jax.Array, Routing | None]:
    """What leaves the layer: what entered it, what its heads attended to, and what the MLP makes of both."""
    x_BTD = x_BTD + product(attended_BTHN, w["o"], axes=2)
    h_BTD = rms_norm(x_BTD, w["mlp_norm"], config.norm_eps)
    y_BTD, routing = mlp(w, h_BTD, choices_BTk)
    return x_BTD + y_BTD, routing


def mlp_of(config: ModelConfig, place: Placement) -> MLP:
    """What follows attention in a layer: `moe.mixture`, or what every token goes through, with no routing."""
    if config.moe:
        return moe.mixture(config.moe, place)
    return lambda w, h_BTD, _: (moe.swiglu(h_BTD, w["gate"], w["up"], w["down"]), None)


def rms_norm(x: jax.Array, scale_N: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis in float32; the scale is applied in x's dtype, as the reference models do."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * scale_N.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
