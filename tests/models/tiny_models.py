"""Tiny decoders whose every weight is drawn at random: no zero bias or unit gain hides a mistake."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_post.models.config import Experts, Llama3Rope, ModelConfig
from jaxrl_post.models.decoder import abstract
from sharding.mesh import make_mesh
from sharding.placement import tree_shardings
from sharding.rules import TRAIN

SCALED = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16)
BASE = ModelConfig(
    family="llama", vocab_size=96, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, head_dim=8,
    norm_eps=1e-5, max_positions=64, initializer_range=0.2,
)  # fmt: skip
CASES = {
    "llama": BASE,
    "llama3-rope": dataclasses.replace(BASE, rope_theta=500.0, rope_scaling=SCALED),
    "qwen2": dataclasses.replace(BASE, family="qwen2", tie_embeddings=True),
    "qwen3": dataclasses.replace(BASE, family="qwen3", head_dim=16),
    "mixtral": dataclasses.replace(BASE, family="mixtral", moe=Experts(4, 2, 48)),
    "qwen2_moe": dataclasses.replace(
        BASE, family="qwen2_moe", moe=Experts(6, 3, 24, shared_size=40, normalized=False), tie_embeddings=True
    ),
    "qwen3_moe": dataclasses.replace(BASE, family="qwen3_moe", head_dim=16, moe=Experts(5, 2, 24)),
}


def draw(config: ModelConfig, seed: int = 0) -> dict:
    """Parameters: matrices and biases around 0, norm gains around 1."""
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        centre = 1.0 if path[-1].key.endswith("norm") else 0.0
        return jnp.asarray(centre + 0.2 * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, abstract(config)[1])


@functools.cache
def logits_of(config: ModelConfig):
    """Jitted (params, tokens [B, T]) -> float32 logits of whole, unpacked rows."""
    graphdef = abstract(config)[0]

    def logits(params, tokens_BT):
        decoder = nnx.merge(graphdef, params)
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        ones = jnp.ones_like(tokens_BT)
        return decoder.logits(decoder.hidden(tokens_BT, positions, ones, 0 * ones))

    return jax.jit(logits)


def shardings_on(config: ModelConfig, **sizes: int):
    count = int(np.prod(list(sizes.values()) or [1]))
    _, shapes, axes = abstract(config)
    return tree_shardings(axes, shapes, TRAIN, make_mesh(sizes, jax.devices()[:count]))


def assert_same_bits(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True), a, b)
