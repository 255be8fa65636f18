"""One decoder for training, prefill and decode: RMSNorm, rotary grouped-query attention, SwiGLU or a mixture of them.

B batch, T time, D width, H query heads, K key/value heads, N per-head width, F mlp width, V vocabulary, L layers, k
experts a token.

Layers (`models.layer`) are stacked on a leading axis and scanned. Each weight declares shape, logical axes and
initialiser once, in `Decoder.__init__`; shardings, abstract trees and format maps derive from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxrl_post.models import backends, moe, rope, sequence
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.layer import Layer, Stack, finished, mlp_of, projected, rms_norm
from jaxrl_post.models.moe import Routing
from jaxrl_post.models.placement import ANYWHERE, SEQUENCE, Placement
from jaxrl_post.models.remat import as_input, remat

Params = dict[str, Any]
Rows = tuple[jax.Array, jax.Array, jax.Array]  # positions, segments, branches [B, T]
State = Any


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
        place: Placement = ANYWHERE,
    ) -> jax.Array:
        """Final hidden states [B, T, D] of packed rows (see `types.TrainBatch`), normed and ready for `logits`."""
        return self.routed(tokens_BT, positions_BT, segments_BT, branches_BT, place)[0]

    def routed(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segments_BT: jax.Array,
        branches_BT: jax.Array,
        place: Placement = ANYWHERE,
        choices_LBTk: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None]:
        """`hidden`, and what the routers of all layers said, with a leading L; None of a model without experts.

        With choices (integers) tokens go to these experts, not to those the routers would choose now. Where time is cut
        over devices, each runs its own columns, and only attention looks further (`models.sequence`).

        Raises: ValueError for rows that cannot be cut so.
        """
        x_BTD, rows = place(self._embed(tokens_BT)), (positions_BT, segments_BT, branches_BT)
        if place.parts == 1:
            return self._packed(x_BTD, rows, place, choices_LBTk, backends.attention(self.config, place))
        kind, (graphdef, params) = self.config.sequence_attention, split(self)
        sequence.check_length(kind, tokens_BT.shape[1], place.parts)
        arrange = lambda axis: functools.partial(sequence.arrange, kind, axis=axis)
        restore = lambda axis: functools.partial(sequence.restore, kind, axis=axis)

        def local(params: Params, columns: Any, choices_LBTk: jax.Array | None) -> tuple[jax.Array, Routing | None]:
            x_BTD, rows = jax.tree.map(arrange(1), columns)
            choices_LBTk = jax.tree.map(arrange(2), choices_LBTk)
            decoder, within = nnx.merge(graphdef, params), place.within()
            attention = backends.attention(self.config, place)
            x_BTD, routing = decoder._packed(within(x_BTD), rows, within, choices_LBTk, attention)
            return restore(1)(x_BTD), jax.tree.map(restore(2), routing)

        assert place.rows is not None
        columns, of_layers = PartitionSpec(None, SEQUENCE), PartitionSpec(None, None, SEQUENCE)
        return jax.shard_map(
            local,
            mesh=place.rows.mesh,
            in_specs=(PartitionSpec(), columns, of_layers),
            out_specs=(columns, of_layers),
            axis_names={SEQUENCE},
            check_vma=False,
        )(params, (x_BTD, rows), choices_LBTk)

    def _packed(
        self,
        x_BTD: jax.Array,
        rows: Rows,
        place: Placement,
        choices_LBTk: jax.Array | None,
        attention: sequence.Attention,
    ) -> tuple[jax.Array, Routing | None]:
        positions_BT, segments_BT, branches_BT = rows
        cos, sin = rope.phases(self.config, positions_BT)
        mlp = mlp_of(self.config, place)

        def layer(x_BTD: jax.Array, of_layer: tuple[Layer, jax.Array | None]) -> tuple[jax.Array, Routing | None]:
            w, choices_BTk = of_layer
            x_BTD = as_input(x_BTD)
            q, k, v = projected(self.config, w, x_BTD, cos, sin)
            attended_BTHN = attention(q, k, v, segments_BT, branches_BT)
            return finished(self.config, w, x_BTD, attended_BTHN, mlp, choices_BTk)

        layer = remat(layer, self.config)
        if self.config.scan_layers:
            x_BTD, routing = lax.scan(layer, x_BTD, (self.stacked(), choices_LBTk))
        else:
            routings = []
            for i, w in enumerate(self.unrolled()):
                x_BTD, of_layer = layer(x_BTD, (w, None if choices_LBTk is None else choices_LBTk[i]))
                routings.append(of_layer)
            routing = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *routings)
        return rms_norm(x_BTD, self.norm[...], self.config.norm_eps), routing

    def stacked(self) -> Layer:
        """The weights of all layers, each array with a leading L."""
        return nnx.to_pure_dict(nnx.state(self.layers, nnx.Param))

    def shares_experts(self) -> bool:
        """Whether these weights hold a part of the experts, and other devices the rest."""
        moe = self.config.moe
        return moe is not None and self.stacked()["expert_gate"].shape[1] < moe.count

    def unrolled(self) -> tuple[Layer, ...]:
        """The weights layer by layer. On a CPU a product first copies its slice of a stack; a loop that comes back to
        the weights cuts them once, before it. Gradients come back by one concatenation, not a sum of padded slices.
        """
        stacks, tree = jax.tree.flatten(self.stacked())
        cut = [lax.split(w, (1,) * self.config.layers) for w in stacks]
        return tuple(jax.tree.unflatten(tree, [w[0] for w in of_layer]) for of_layer in zip(*cut, strict=True))

    def through(
        self,
        weights: Layer | tuple[Layer, ...],
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        state: State,
        attention: Callable[[State, jax.Array | None, jax.Array, jax.Array, jax.Array], tuple[jax.Array, State]],
    ) -> tuple[jax.Array, State]:
        """Hidden states, normed and ready for `logits`, where attention is the caller's: over a cache, for one.

        Args:
          weights: `stacked()`, which are scanned, or `unrolled()`.
          state: what attention keeps: a pytree with a leading L in each array, or a tuple of one for each layer.
          attention: (state, layer, q [B, T, H, N], k and v [B, T, K, N], both rotated) to the attended values
            [B, T, H, N] and the state with what it wrote. The layer is None for the state of that layer alone.

        Returns: [B, T, D] and the state.
        """
        return self.routed_through(weights, tokens_BT, positions_BT, state, attention)[:2]

    def routed_through(
        self,
        weights: Layer | tuple[Layer, ...],
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        state: State,
        attention: Callable[[State, jax.Array | None, jax.Array, jax.Array, jax.Array], tuple[jax.Array, State]],
    ) -> tuple[jax.Array, State, jax.Array | None]:
        """`through`, and the experts that each token went to, as `moe.record`, [L, B, T, k]; None without experts."""
        cos, sin = rope.phases(self.config, positions_BT)
        mlp = mlp_of(self.config, ANYWHERE)

        def layer(x_BTD: jax.Array, state: State, i: jax.Array | None, w: Layer) -> tuple[Any, jax.Array | None]:
            attended_BTHN, state = attention(state, i, *projected(self.config, w, x_BTD, cos, sin))
            x_BTD, routing = finished(self.config, w, x_BTD, attended_BTHN, mlp, None)
            return (x_BTD, state), moe.record(routing) if routing else None

        x_BTD = self._embed(tokens_BT)
        if isinstance(weights, tuple):
            after, chosen = [], []
            for w, own in zip(weights, state, strict=True):
                (x_BTD, own), choices_BTk = layer(x_BTD, own, None, w)
                after.append(own)
                chosen.append(choices_BTk)
            state, choices_LBTk = tuple(after), jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *chosen)
        else:
            step = lambda carry, xs: layer(*carry, *xs)
            (x_BTD, state), choices_LBTk = lax.scan(step, (x_BTD, state), (jnp.arange(self.config.layers), weights))
        return rms_norm(x_BTD, self.norm[...], self.config.norm_eps), state, choices_LBTk

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores over the vocabulary, float32 [..., V], of final hidden states [..., D]."""
        return scores(self.scorer(), x)

    def scorer(self) -> jax.Array:
        """The weights [V, D] of `logits`."""
        return (self.embed if self.config.tie_embeddings else self.head)[...]

    def _embed(self, tokens: jax.Array) -> jax.Array:
        return self.embed[...].astype(self.config.dtype)[tokens]


def scores(scorer_VD: jax.Array, x: jax.Array) -> jax.Array:
    """`Decoder.logits` with its weights at hand: float32 [..., V] of [..., D]."""
    folded_XD = x.reshape(-1, x.shape[-1])  # see `product`
    logits_XV = jnp.einsum("xd,vd->xv", folded_XD, scorer_VD.astype(x.dtype), preferred_element_type=jnp.float32)
    return logits_XV.reshape(*x.shape[:-1], -1)


def split(decoder: Decoder) -> tuple[nnx.GraphDef, Params]:
    """(graphdef, params): params are a nested dict of arrays; `nnx.merge(graphdef, params)` undoes it."""
    graphdef, state = nnx.split(decoder, nnx.Param)
    return graphdef, nnx.to_pure_dict(state)


def abstract(config: ModelConfig) -> tuple[nnx.GraphDef, Params, Params]:
    """graphdef, params as `jax.ShapeDtypeStruct`, and the tree of logical axes, without allocating anything."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, jax.random.key(0))), nnx.Param)
    axes = jax.tree.map(lambda p: p.axes, state, is_leaf=lambda p: isinstance(p, nnx.Param))
    return graphdef, nnx.to_pure_dict(state), nnx.to_pure_dict(axes)
