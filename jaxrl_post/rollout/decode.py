"""A decode step: one more token for every running slot. And packing these into fewer.

S slots, N requests, L layers, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.rollout import cache as caches
from jaxrl_post.rollout import decode_kernel
from jaxrl_post.rollout.records import keep_choices
from jaxrl_post.rollout.replica import Replica, Slots, State


def decode(replica: Replica, end: int, state: State) -> State:
    """One more token for every running slot, from the first `end` columns of the cache."""
    shape, requests, slots = replica.shape, replica.requests, state.slots
    active_S, known_S = replica.active(state), jnp.minimum(slots.request, replica.N - 1)
    length_S = requests.lengths[known_S // shape.group]
    position_S1 = (length_S + slots.sampled - 1)[:, None]
    attention = _attention(replica, state, end, active_S, length_S)
    x_S1D, cache, choices_LS1k = replica.decoder.routed_through(
        replica.weights, slots.token[:, None], position_S1, state.cache, attention
    )
    logits_SV = replica.decoder.logits(x_S1D[:, 0])
    samples, drawn, history, done_S = replica.next_token(
        state.samples, logits_SV, known_S, slots.sampled, slots.history, active_S
    )
    return state._replace(
        cache=cache,
        slots=Slots(
            jnp.where(done_S, replica.N, slots.request), slots.row, slots.sampled + active_S, drawn.token, history
        ),
        clock=state.clock + 1,
        samples=keep_choices(samples, choices_LS1k, slots.request, slots.sampled - 1)._replace(
            decode_steps=samples.decode_steps + 1
        ),
    )


def pack(replica: Replica, state: State, slots: int) -> State:
    """The running sequences in the first `slots` slots; there are no more of them than that."""
    if slots == len(state.slots.request):
        return state
    slot_S = jnp.argsort(~replica.active(state), stable=True)[:slots]
    return state._replace(
        cache=caches.pack(state.cache, slot_S),
        slots=jax.tree.map(lambda x: x[slot_S], state.slots),
    )


def _attention(
    replica: Replica, state: State, end: int, active_S: jax.Array, length_S: jax.Array
) -> Callable[..., Any]:
    """Of a decode step that reads the response columns before `end`, as `Decoder.through` takes it."""
    slots, shape = state.slots, replica.shape
    if shape.attention != "xla":
        column = state.clock % shape.max_new
        seen = decode_kernel.Seen(slots.row, jnp.where(active_S, length_S, 0), slots.sampled, column)
        return functools.partial(decode_kernel.attend, seen, shape.attention == "interpreted")
    in_order = replica.together and len(slots.row) == replica.N
    row_S = None if in_order else slots.row
    step = caches.decode_step(state.cache, end, state.clock, row_S, length_S, slots.sampled)
    return functools.partial(caches.attend_cache, step)
