"""One decoder for training, prefill and decode: RMSNorm, rotary grouped-query attention, SwiGLU (Llama, Qwen2, Qwen3).

B batch, T time, D width, H query heads, K key/value heads, N per-head width, F mlp width, V vocabulary, L layers,
S cache slots, C cache columns, U prompts of a prefill, F_ slots it fills.

Layers are stacked on a leading axis and scanned. Each weight declares shape, logical axes and initialiser once, in
`Decoder.__init__`; shardings, abstract trees and format maps derive from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxrl_post.models import rope
from jaxrl_post.models.attention import attend, packed_attention
from jaxrl_post.models.config import ModelConfig

Params = dict[str, Any]
Layer = dict[str, jax.Array]


class Cache(NamedTuple):
    """Keys and values, head-major [L, S, K, C, N]: the layout decode reads without a transpose."""

    k: jax.Array
    v: jax.Array


def empty_cache(config: ModelConfig, slots: int, columns: int) -> Cache:
    shape = (config.layers, slots, config.kv_heads, columns, config.head_dim)
    return Cache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))


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
        self.gate = weight((L, D, F), ("layers", "embed", "mlp"))
        self.up = weight((L, D, F), ("layers", "embed", "mlp"))
        self.down = weight((L, F, D), ("layers", "mlp", "embed"))


class Decoder(nnx.Module):
    """A causal language model. Build with a key for random weights; `split` makes it (graphdef, params)."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        self.config = config
        keys = iter(jax.random.split(key, 16))

        def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], fill: float | None = None) -> nnx.Param:
            if fill is None:
                value = config.initializer_range * jax.random.normal(next(keys), shape, jnp.float32)
            else:
                value = jnp.full(shape, fill, jnp.float32)
            return nnx.Param(value.astype(config.param_dtype), axes=axes)

        self.embed = weight((config.vocab_size, config.hidden_size), ("vocab", "embed"))
        self.layers = Stack(config, weight)
        self.norm = weight((config.hidden_size,), (None,), 1.0)
        if not config.tie_embeddings:
            self.head = weight((config.vocab_size, config.hidden_size), ("vocab", "embed"))

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segments_BT: jax.Array,
        branches_BT: jax.Array,
        place: Callable[[jax.Array], jax.Array] = lambda x_BTD: x_BTD,
    ) -> jax.Array:
        """Final hidden states [B, T, D] of packed rows (see `types.TrainBatch`), normed and ready for `logits`.

        `place` may constrain the sharding of the residual stream. Without it, and with D of the weights cut over a
        batch axis, the compiler gathers the rows on every device instead of the weights.
        """
        cos, sin = rope.phases(self.config, positions_BT)

        def layer(x_BTD: jax.Array, w: Layer) -> tuple[jax.Array, None]:
            q, k, v = self._qkv(w, x_BTD, cos, sin)
            x_BTD = self._finish(w, x_BTD, packed_attention(q, k, v, segments_BT, branches_BT))
            return x_BTD, None

        x_BTD, _ = lax.scan(_remat(layer, self.config.remat), place(self._embed(tokens_BT)), self._stacked())
        return _norm(x_BTD, self.norm[...], self.config.norm_eps)

    def prefill(
        self, tokens_UP: jax.Array, lengths_U: jax.Array, cache: Cache, slots_F: jax.Array, source_F: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Run prompts once and write each one's keys and values to the slots of its group.

        Args:
          tokens_UP: right-padded prompts; what lies beyond a length has no effect.
          lengths_U: prompt lengths, ≥ 1.
          cache: columns 0…P-1 of the filled slots are overwritten.
          slots_F: cache slot of each new sequence; S (out of range) writes nothing.
          source_F: which of the U prompts each new sequence continues.

        Returns: hidden state of each prompt's last token, [U, D], and the cache.
        """
        U, P = tokens_UP.shape
        positions_UP = jnp.broadcast_to(jnp.arange(P), (U, P))
        cos, sin = rope.phases(self.config, positions_UP)
        live_UP = (positions_UP < lengths_U[:, None]).astype(jnp.int32)
        branches_UP = jnp.zeros_like(live_UP)

        def layer(
            carry: tuple[jax.Array, Cache, jax.Array], w: Layer
        ) -> tuple[tuple[jax.Array, Cache, jax.Array], None]:
            x_UPD, cache, i = carry
            q, k, v = self._qkv(w, x_UPD, cos, sin)
            write = lambda old, new: old.at[i, slots_F, :, :P].set(new.swapaxes(1, 2)[source_F], mode="drop")
            cache = Cache(write(cache.k, k), write(cache.v, v))
            x_UPD = self._finish(w, x_UPD, packed_attention(q, k, v, live_UP, branches_UP))
            return (x_UPD, cache, i + 1), None

        carry = (self._embed(tokens_UP), cache, jnp.int32(0))
        (x_UPD, cache, _), _ = lax.scan(layer, carry, self._stacked())
        last_UD = jnp.take_along_axis(x_UPD, (lengths_U - 1)[:, None, None], axis=1)[:, 0]
        return _norm(last_UD, self.norm[...], self.config.norm_eps), cache

    def decode(self, tokens_S: jax.Array, positions_S: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """One token for every slot: hidden states [S, D] and the cache with the token's key and value.

        A position of C (out of range) writes nothing; that slot's hidden state is meaningless.
        """
        S, C = tokens_S.shape[0], cache.k.shape[3]
        cos, sin = rope.phases(self.config, positions_S[:, None])
        mask_S1C = jnp.arange(C)[None, None] <= positions_S[:, None, None]
        slot_S = jnp.arange(S)

        def layer(
            carry: tuple[jax.Array, Cache, jax.Array], w: Layer
        ) -> tuple[tuple[jax.Array, Cache, jax.Array], None]:
            x_S1D, cache, i = carry
            q, k, v = self._qkv(w, x_S1D, cos, sin)
            write = lambda old, new: old.at[i, slot_S, :, positions_S].set(new[:, 0], mode="drop")
            cache = Cache(write(cache.k, k), write(cache.v, v))
            x_S1D = self._finish(w, x_S1D, attend(q, cache.k[i], cache.v[i], mask_S1C))
            return (x_S1D, cache, i + 1), None

        carry = (self._embed(tokens_S[:, None]), cache, jnp.int32(0))
        (x_S1D, cache, _), _ = lax.scan(layer, carry, self._stacked())
        return _norm(x_S1D[:, 0], self.norm[...], self.config.norm_eps), cache

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores over the vocabulary, float32 [..., V], of final hidden states [..., D]."""
        head_VD = self.embed if self.config.tie_embeddings else self.head
        return jnp.einsum("...d,vd->...v", x, head_VD[...].astype(x.dtype), preferred_element_type=jnp.float32)

    def _embed(self, tokens: jax.Array) -> jax.Array:
        return self.embed[...].astype(self.config.dtype)[tokens]

    def _stacked(self) -> Layer:
        return nnx.to_pure_dict(nnx.state(self.layers, nnx.Param))

    def _qkv(
        self, w: Layer, x_BTD: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        h = _norm(x_BTD, w["attention_norm"], config.norm_eps)
        q, k, v = (jnp.einsum("btd,dhn->bthn", h, w[name].astype(h.dtype)) for name in "qkv")
        if config.qkv_bias:
            q, k, v = (
                y + w[f"{name}_bias"].astype(h.dtype)[None, None] for y, name in zip((q, k, v), "qkv", strict=True)
            )
        if config.qk_norm:
            q, k = _norm(q, w["q_norm"], config.norm_eps), _norm(k, w["k_norm"], config.norm_eps)
        return rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v

    def _finish(self, w: Layer, x_BTD: jax.Array, attended_BTHN: jax.Array) -> jax.Array:
        x_BTD = x_BTD + jnp.einsum("bthn,hnd->btd", attended_BTHN, w["o"].astype(x_BTD.dtype))
        h = _norm(x_BTD, w["mlp_norm"], self.config.norm_eps)
        gate, up, down = (w[name].astype(h.dtype) for name in ("gate", "up", "down"))
        return x_BTD + (jax.nn.silu(h @ gate) * (h @ up)) @ down


def _norm(x: jax.Array, scale_N: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis in float32; the scale is applied in x's dtype, as the reference models do."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * scale_N.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def _remat(layer: Callable, policy: str) -> Callable:
    if policy == "none":
        return layer
    saveable = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}[policy]
    return jax.checkpoint(layer, policy=saveable, prevent_cse=False)


def split(decoder: Decoder) -> tuple[nnx.GraphDef, Params]:
    """(graphdef, params): params are a nested dict of arrays; `nnx.merge(graphdef, params)` undoes it."""
    graphdef, state = nnx.split(decoder, nnx.Param)
    return graphdef, nnx.to_pure_dict(state)


def abstract(config: ModelConfig) -> tuple[nnx.GraphDef, Params, Params]:
    """graphdef, params as `jax.ShapeDtypeStruct`, and the tree of logical axes, without allocating anything."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, jax.random.key(0))), nnx.Param)
    axes = jax.tree.map(lambda p: p.axes, state, is_leaf=lambda p: isinstance(p, nnx.Param))
    return graphdef, nnx.to_pure_dict(state), nnx.to_pure_dict(axes)
