"""The rollout engine: a whole rollout is one XLA program.

N requests (P prompts × G samples each, in prompt order) wait in a queue; S slots hold running sequences. Two nested
loops: the outer one refills K free slots from the queue, the inner one decodes a token for every slot until K slots are
free again. No `lax.cond` touches the cache, so XLA updates it in place. Each data replica runs its own loops on its
own share of the requests (`shard_map` over the batch axes); tensor axes are left to the compiler.

W prompt width, R response limit, C = W + R cache columns, V vocabulary, U = K/G prompts of a refill (at least 1).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_post.models.decoder import Cache, Decoder, Params, empty_cache
from jaxrl_post.rollout.sampling import Draw, Features, Sampling, draw, uniforms
from jaxrl_post.types import StopReason
from sharding.mesh import BATCH_AXES


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Everything static about a rollout on one data replica; a new value means a new compile."""

    slots: int
    refill: int
    group: int
    width: int
    max_new: int
    features: Features

    def __post_init__(self) -> None:
        if self.refill > self.slots:
            raise ValueError(f"refill={self.refill} cannot exceed slots={self.slots}")
        if self.refill % self.group and self.group % self.refill:
            raise ValueError(f"refill={self.refill} must be a multiple or a divisor of the group size {self.group}")

    @property
    def prompts_per_refill(self) -> int:
        return max(1, self.refill // self.group)


class Requests(NamedTuple):
    """What to sample. Per prompt: tokens int32 [P, W] right-padded, lengths int32 [P] ≥ 1. Per request, in prompt
    order: ids int32 [N] (key the draws), seeds uint32 [N], limits int32 [N] new tokens (0 samples nothing), and
    `options` [N]. The padding of the last refill is the engine's business, not the caller's.
    """

    tokens: Any
    lengths: Any
    ids: Any
    seeds: Any
    limits: Any
    options: Sampling


class Samples(NamedTuple):
    """What was sampled: tokens int32 [N, R], logp and raw_logp float32 [N, R], lengths int32 [N], stops int32 [N]
    (`StopReason`, 0 for a request with limit 0). Entries at or beyond a length are 0. `decode_steps` and `refills`
    int32 [1] a replica.
    """

    tokens: Any
    logp: Any
    raw_logp: Any
    lengths: Any
    stops: Any
    decode_steps: Any
    refills: Any


class State(NamedTuple):
    """Per slot: the running request (N = free), how many tokens it has sampled, the last one; and the queue's head."""

    cache: Cache
    request: jax.Array
    sampled: jax.Array
    token: jax.Array
    queued: jax.Array
    samples: Samples


def make_rollout(graphdef: nnx.GraphDef, shape: EngineShape, mesh: Mesh) -> Callable[..., Samples]:
    """Compile-once `rollout(params, requests, stop_ids, step) -> Samples`.

    params: the training tree, laid out by rules whose weights are whole on every replica. requests: arrays with the
    leading axis a multiple of the number of replicas. stop_ids: int32 [E]. step: int32, the policy step.
    """
    replica, sharded = PartitionSpec(), PartitionSpec(BATCH_AXES)
    run = functools.partial(_rollout, graphdef, shape)
    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(replica, sharded, replica, replica),
            out_specs=sharded,
            axis_names=set(BATCH_AXES),
            check_vma=False,
        )
    )


def _rollout(
    graphdef: nnx.GraphDef, shape: EngineShape, params: Params, requests: Requests, stop_ids: jax.Array, step: jax.Array
) -> Samples:
    decoder: Decoder = nnx.merge(graphdef, params)
    N = requests.ids.shape[0]
    refill = functools.partial(_refill, decoder, shape, requests, stop_ids, step)
    decode = functools.partial(_decode, decoder, shape, requests, stop_ids, step)

    def waiting(state: State) -> jax.Array:
        return (state.queued < N) | (state.request < N).any()

    def decoding(state: State) -> jax.Array:
        active_S = state.request < N
        return active_S.any() & ((state.queued >= N) | ((~active_S).sum() < shape.refill))

    state = _start(decoder, shape, N)
    return lax.while_loop(waiting, lambda s: lax.while_loop(decoding, decode, refill(s)), state).samples


def _start(decoder: Decoder, shape: EngineShape, N: int) -> State:
    S, R = shape.slots, shape.max_new
    ints, floats = (lambda *s: jnp.zeros(s, jnp.int32)), (lambda *s: jnp.zeros(s, jnp.float32))
    return State(
        cache=empty_cache(decoder.config, S, shape.width + R),
        request=jnp.full((S,), N, jnp.int32),
        sampled=ints(S),
        token=ints(S),
        queued=jnp.int32(0),
        samples=Samples(ints(N, R), floats(N, R), floats(N, R), ints(N), ints(N), ints(1), ints(1)),
    )


def _refill(
    decoder: Decoder, shape: EngineShape, requests: Requests, stop_ids: jax.Array, step: jax.Array, state: State
) -> State:
    """Admit the next K requests to the first K free slots: one prefill for each prompt, fanned out to its group."""
    S, K, G, N = shape.slots, shape.refill, shape.group, requests.ids.shape[0]
    free_S = state.request >= N
    slot_K = jnp.argsort(~free_S, stable=True)[:K]
    request_K = state.queued + jnp.arange(K)
    admitted_K = request_K < N  # the loops call this only when K slots are free
    prompt_U = jnp.minimum(state.queued // G + jnp.arange(shape.prompts_per_refill), requests.lengths.shape[0] - 1)
    source_K = jnp.arange(K) // G  # all 0 when a refill is part of a group
    write_K = jnp.where(admitted_K, slot_K, S)

    last_UD, cache = decoder.prefill(
        requests.tokens[prompt_U], requests.lengths[prompt_U], state.cache, write_K, source_K
    )
    known_K = jnp.minimum(request_K, N - 1)
    drawn = _draw(decoder, shape, requests, step, decoder.logits(last_UD)[source_K], known_K, jnp.zeros_like(known_K))
    admitted_K &= requests.limits[known_K] > 0
    samples, done_K = _record(state.samples, requests, stop_ids, drawn, known_K, jnp.zeros_like(known_K), admitted_K)
    put = lambda old_S, new_K: old_S.at[write_K].set(new_K, mode="drop")
    return State(
        cache=cache,
        request=put(state.request, jnp.where(admitted_K & ~done_K, request_K, N)),
        sampled=put(state.sampled, jnp.ones_like(request_K)),
        token=put(state.token, drawn.token),
        queued=jnp.minimum(state.queued + K, N),
        samples=samples._replace(refills=samples.refills + 1),
    )


def _decode(
    decoder: Decoder, shape: EngineShape, requests: Requests, stop_ids: jax.Array, step: jax.Array, state: State
) -> State:
    """One more token for every running slot."""
    N, C = requests.ids.shape[0], shape.width + shape.max_new
    active_S, known_S = state.request < N, jnp.minimum(state.request, N - 1)
    position_S = requests.lengths[known_S // shape.group] + state.sampled - 1
    hidden_SD, cache = decoder.decode(state.token, jnp.where(active_S, position_S, C), state.cache)
    drawn = _draw(decoder, shape, requests, step, decoder.logits(hidden_SD), known_S, state.sampled)
    samples, done_S = _record(state.samples, requests, stop_ids, drawn, known_S, state.sampled, active_S)
    return State(
        cache=cache,
        request=jnp.where(done_S, N, state.request),
        sampled=state.sampled + active_S,
        token=drawn.token,
        queued=state.queued,
        samples=samples._replace(decode_steps=samples.decode_steps + 1),
    )


def _draw(
    decoder: Decoder,
    shape: EngineShape,
    requests: Requests,
    step: jax.Array,
    logits_XV: jax.Array,
    request_X: jax.Array,
    count_X: jax.Array,
) -> Draw:
    options = Sampling(*(x[request_X] for x in requests.options))
    uniform_X2 = uniforms(requests.seeds[request_X], step, requests.ids[request_X], count_X)
    return draw(logits_XV, options, uniform_X2, shape.features)


def _record(
    samples: Samples,
    requests: Requests,
    stop_ids: jax.Array,
    drawn: Draw,
    request_X: jax.Array,
    count_X: jax.Array,
    live_X: jax.Array,
) -> tuple[Samples, jax.Array]:
    """Write each live row's token as number `count` of its request; tell which requests are done."""
    N = requests.ids.shape[0]
    to_X = jnp.where(live_X, request_X, N)
    stopped_X = (drawn.token[:, None] == stop_ids[None, :]).any(axis=-1)
    full_X = count_X + 1 >= requests.limits[request_X]
    reason_X = jnp.where(stopped_X, StopReason.STOP, jnp.where(full_X, StopReason.LENGTH, 0)).astype(jnp.int32)
    put = lambda old, new: old.at[to_X, count_X].set(new, mode="drop")
    recorded = samples._replace(
        tokens=put(samples.tokens, drawn.token),
        logp=put(samples.logp, drawn.logp),
        raw_logp=put(samples.raw_logp, drawn.raw_logp),
        lengths=samples.lengths.at[to_X].set(count_X + 1, mode="drop"),
        stops=samples.stops.at[to_X].set(reason_X, mode="drop"),
    )
    return recorded, live_X & (stopped_X | full_X)
