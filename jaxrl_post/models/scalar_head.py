"""One number from a hidden state: the head of a reward model and of a critic."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_post.models.config import ModelConfig

Head = dict[str, jax.Array]
AXES = {"weight": ("embed",)}


def init_head(config: ModelConfig, key: jax.Array) -> Head:
    """`weight` [D], drawn with scale 1/√(D + 1) (arXiv:2009.01325). No bias: it would cancel in every comparison."""
    D = config.hidden_size
    weight_D = jax.random.normal(key, (D,), jnp.float32) / jnp.sqrt(jnp.float32(D + 1))
    return {"weight": weight_D.astype(config.param_dtype)}


def abstract_head(config: ModelConfig) -> Head:
    """Shapes and dtypes of `init_head`'s arrays."""
    return jax.eval_shape(lambda: init_head(config, jax.random.key(0)))


def scores_at(head: Head, x_BTD: jax.Array, column_BS: jax.Array) -> jax.Array:
    """Scores float32 [B, S] at those columns (int32) of packed rows."""
    return scores(head, jnp.take_along_axis(x_BTD, column_BS[..., None], axis=1, mode="clip"))


def scores(head: Head, x_BSD: jax.Array) -> jax.Array:
    """Scores float32 [B, S] of hidden states, products added up in float32."""
    return jnp.einsum("bsd,d->bs", x_BSD.astype(jnp.float32), head["weight"].astype(jnp.float32))
