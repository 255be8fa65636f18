"""The compiled programs of the host-driven engine: prefill a piece, insert a prefix, extend a slot, decode k steps.

S slots, W columns of a slot, k steps of a call, B columns of a piece, V vocabulary, L tokens of the longest bad word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Layer, Params, abstract
from jaxrl_post.models.moe import replica_specs
from jaxrl_post.rollout import cache as caches
from jaxrl_post.rollout.logits import History, extend, no_history, shaped, stopped
from jaxrl_post.rollout.sampling import Features, Sampling, draw, likeliest, uniforms
from jaxrl_post.rollout.step_cache import Caches, attend_rows, copy_row, empty_rows
from jaxrl_post.types import StopReason
from sharding.mesh import BATCH_AXES, batch_shards
from sharding.rules import ROLLOUT, partition_spec


class Weights(NamedTuple):
    """Parameters in the rollout layout and the layers as the decode steps read them. Layers out of their stacks leave
    stacks of none behind in `params`."""

    params: Params
    layers: Layer | tuple[Layer, ...]


class Past(NamedTuple):
    """What penalties look back on: prompt int32 [S, W] and its length int32 [S], output int32 [S, W] with NOWHERE after
    its end, and recent int32 [S, L-1], the last of it."""

    prompt: Any
    length: Any
    output: Any
    recent: Any


class Inputs(NamedTuple):
    """What the host knows of its slots, [S] each: the pending token, tokens in the cache and sampled, the limit, …

    `past` is None where no request looks back.
    """

    token: Any
    length: Any
    sampled: Any
    limit: Any
    running: Any
    id: Any
    seed: Any
    step: Any
    options: Sampling
    past: Past | None


class Steps(NamedTuple):
    """Of k steps, [k, S] each and the likeliest tokens [k, S, top]; `live` False where a slot had ended."""

    token: Any
    logp: Any
    raw_logp: Any
    stop: Any
    live: Any
    top_ids: Any
    top_logp: Any


class Programs:
    """Compiled programs. Each data replica works on its own slots; weights and prefixes are whole on each."""

    def __init__(self, graphdef: nnx.GraphDef, config: ModelConfig, mesh: Mesh, slots: int, columns: int, steps: int):
        self.steps = steps
        self._graphdef, self._config, self._mesh = graphdef, config, mesh
        self._unrolled = jax.default_backend() == "cpu"
        self._slots_each = slots // batch_shards(mesh)
        cache = jax.eval_shape(lambda: empty_rows(config, self._unrolled, slots, columns))
        outer = () if self._unrolled else ("layers",)
        shardings = lambda rows: jax.tree.map(
            lambda x: NamedSharding(
                mesh, partition_spec((*outer, rows, "kv_heads", None, None), x.shape, ROLLOUT, mesh, "cache")
            ),
            cache,
        )
        self._slot_shardings, self._prefix_shardings = shardings("batch"), shardings(None)
        self._slot_axis = PartitionSpec(*(None for _ in outer), BATCH_AXES)
        whole, by_slot = PartitionSpec(), PartitionSpec(BATCH_AXES)
        weights = self._weight_specs()
        self.prefill = self._program(
            self._prefill, (weights, whole, whole, whole), whole, self._prefix_shardings, donated=1
        )
        self.extend = self._program(
            self._extend,
            (weights, self._slot_axis, whole, whole, whole),
            self._slot_axis,
            self._slot_shardings,
            donated=1,
        )
        self.insert = self._program(
            self._insert, (self._slot_axis, whole, whole), self._slot_axis, self._slot_shardings, donated=0
        )
        self._weights, self._by_slot = weights, by_slot
        self._decodes: dict[tuple[Features, int, int], Callable[..., tuple[Caches, Steps]]] = {}
        self._empties: dict[tuple[int, int], Callable[[], Caches]] = {}

    def load(self, params: Params) -> Weights:
        decoder = nnx.merge(self._graphdef, params)
        if not self._unrolled:
            return Weights(params, decoder.stacked())
        none = jax.tree.map(lambda stack: stack[:0], params["layers"])
        return Weights({**params, "layers": none}, decoder.unrolled())

    def _weight_specs(self) -> Weights:
        """Experts stay cut over the replicas that share them, which run the same programs."""
        params = replica_specs(abstract(self._config)[2])
        layers = params["layers"]
        if self._unrolled:
            one = {name: PartitionSpec(*spec[1:]) for name, spec in layers.items()}
            layers = (one,) * self._config.layers
        return Weights(params, layers)

    def empty(self, rows: int, columns: int) -> Caches:
        """Of all slots, or a prefix of one row."""
        if (rows, columns) not in self._empties:
            shardings = self._prefix_shardings if rows == 1 else self._slot_shardings
            make = functools.partial(empty_rows, self._config, self._unrolled, rows, columns)
            self._empties[rows, columns] = jax.jit(make, out_shardings=shardings)
        return self._empties[rows, columns]()

    def decode(self, features: Features, columns: int, top: int) -> Callable[..., tuple[Caches, Steps]]:
        """(weights, cache, inputs) to the cache and `Steps`, compiled once for what is asked."""
        asked = features, columns, top
        if asked not in self._decodes:
            self._decodes[asked] = self._program(
                functools.partial(self._decode, *asked),
                (self._weights, self._slot_axis, self._by_slot),
                (self._slot_axis, PartitionSpec(None, BATCH_AXES)),
                (self._slot_shardings, None),
                donated=1,
            )
        return self._decodes[asked]

    def _program(self, run: Callable, in_specs: Any, out_specs: Any, out_shardings: Any, donated: int) -> Callable:
        mapped = jax.shard_map(
            run, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(BATCH_AXES), check_vma=False
        )
        return jax.jit(mapped, out_shardings=out_shardings, donate_argnums=donated)

    # What each replica runs.

    def _prefill(self, weights: Weights, cache: Caches, start: jax.Array, token_1B: jax.Array) -> Caches:
        return self._piece(weights, cache, jnp.zeros(1, jnp.int32), start, token_1B)

    def _extend(
        self, weights: Weights, cache: Caches, slot: jax.Array, start: jax.Array, token_1B: jax.Array
    ) -> Caches:
        row, mine = self._local(slot)
        return self._piece(weights, cache, jnp.where(mine, row, self._slots_each)[None], start, token_1B)

    def _insert(self, cache: Caches, prefix: Caches, slot: jax.Array) -> Caches:
        return copy_row(cache, prefix, *self._local(slot))

    def _local(self, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The slot's row on its replica, and whether that is this one."""
        row = slot - lax.axis_index(BATCH_AXES) * self._slots_each
        return jnp.clip(row, 0, self._slots_each - 1), (row >= 0) & (row < self._slots_each)

    def _piece(
        self, weights: Weights, cache: Caches, row_1: jax.Array, start: jax.Array, token_1B: jax.Array
    ) -> Caches:
        decoder = nnx.merge(self._graphdef, weights.params)
        position_1B = start + jnp.arange(token_1B.shape[1])[None]
        attention = functools.partial(caches.attend_prompt, start, row_1)
        return decoder.through(weights.layers, token_1B, position_1B, cache, attention)[1]

    def _decode(
        self, features: Features, columns: int, top: int, weights: Weights, cache: Caches, inputs: Inputs
    ) -> tuple[Caches, Steps]:
        decoder = nnx.merge(self._graphdef, weights.params)
        options = inputs.options

        def step(carry: tuple[Caches, Inputs, History], _: None) -> tuple[tuple[Caches, Inputs, History], Steps]:
            cache, at, history = carry
            attention = functools.partial(attend_rows, at.length, at.running, columns)
            x_S1D, cache = decoder.through(weights.layers, at.token[:, None], at.length[:, None], cache, attention)
            logits_SV = decoder.logits(x_S1D[:, 0])
            shaped_SV = shaped(logits_SV, options, history, at.sampled, features) if features.shapes_logits else None
            drawn = draw(logits_SV, options, _uniforms(at), features, shaped_SV)
            history, completed_S = extend(history, drawn.token, None)
            stopped_S = stopped(options, drawn.token, completed_S, at.sampled)
            full_S = at.sampled + 1 >= at.limit
            stop_S = jnp.where(stopped_S, StopReason.STOP, jnp.where(full_S, StopReason.LENGTH, 0)).astype(jnp.int32)
            after = at._replace(
                token=jnp.where(at.running, drawn.token, at.token),
                length=at.length + at.running,
                sampled=at.sampled + at.running,
                running=at.running & (stop_S == 0),
            )
            likely = likeliest(logits_SV, top) if top else _none(logits_SV)
            return (cache, after, history), Steps(drawn.token, drawn.logp, drawn.raw_logp, stop_S, at.running, *likely)

        history = _remembered(inputs.past, options, features, self._config.vocab_size)
        (cache, _, _), steps = lax.scan(step, (cache, inputs, history), None, length=self.steps)
        return cache, steps


def _uniforms(at: Inputs) -> jax.Array:
    """As in the in-graph engine, of which all requests have one step."""
    one = lambda seed, step, request, position: uniforms(seed[None], step, request[None], position[None])[0]
    return jax.vmap(one)(at.seed, at.step, at.id, at.sampled)


def _none(logits_SV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """No likeliest tokens."""
    S = len(logits_SV)
    return jnp.zeros((S, 0), jnp.int32), jnp.zeros((S, 0), jnp.float32)


def _remembered(past: Past | None, options: Sampling, features: Features, vocab: int) -> History:
    """What the in-graph engine would remember of these sequences."""
    if past is None:
        return History(None, None, None, None)
    S, W = past.output.shape
    history = no_history(past.prompt, past.length, options, features, vocab, W)
    count = lambda output_SV: output_SV.at[jnp.arange(S)[:, None], past.output].add(1, mode="drop")
    return history._replace(
        output=None if history.output is None else count(history.output),
        recent=None if history.recent is None else past.recent,
    )
