"""A refill of free slots: prompts through the model a piece at a time, then their requests' first tokens.

K slots and M prompts of a refill, B columns of a piece, P prompts, U prompt rows of the cache, V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_post.rollout import cache as caches
from jaxrl_post.rollout import partial
from jaxrl_post.rollout.records import keep_prompt_choices
from jaxrl_post.rollout.replica import Admission, Replica, Slots, State
from jaxrl_post.rollout.schedule import PREFILL_TOKENS


def refill(replica: Replica, state: State) -> State:
    """One more piece of the next M prompts; after the last one K requests start in the slots set aside for them."""
    shape, requests = replica.shape, replica.requests
    start = state.admission.pieces == 0
    admission = jax.tree.map(lambda new, old: jnp.where(start, new, old), _admission(replica, state), state.admission)
    prompt_M = jnp.minimum(
        state.queued // shape.group + jnp.arange(shape.prompts_per_refill), len(replica.tokens_PW) - 1
    )
    begin = admission.pieces * shape.piece
    token_MB = lax.dynamic_slice_in_dim(replica.tokens_PW[prompt_M], begin, shape.piece, axis=1)
    position_MB = jnp.broadcast_to(begin + jnp.arange(shape.piece), token_MB.shape)
    attention = functools.partial(caches.attend_prompt, begin, admission.row)
    x_MBD, cache, choices_LMBk = replica.decoder.routed_through(
        replica.weights, token_MB, position_MB, state.cache, attention
    )
    offset_M = requests.lengths[prompt_M] - 1 - begin
    at_M = jnp.clip(offset_M, 0, shape.piece - 1)
    last_MD = jnp.take_along_axis(x_MBD, at_M[:, None, None], axis=1)[:, 0]
    last_MD = jnp.where((offset_M == at_M)[:, None], last_MD, admission.last)
    done = admission.pieces + 1 == shape.pieces
    state = state._replace(
        cache=cache,
        admission=admission._replace(last=last_MD, pieces=jnp.where(done, 0, admission.pieces + 1)),
        samples=keep_prompt_choices(state.samples, choices_LMBk, state.queued // shape.group, begin),
    )
    return _admit(replica, state, done)


def _admission(replica: Replica, state: State) -> Admission:
    """K free slots and M prompt rows that no running slot reads; no row for what is beyond the queue.

    With a slot for every request these are the next ones, so that slots stay in the order of the prompts.
    """
    shape = replica.shape
    prompt_M = state.queued // shape.group + jnp.arange(shape.prompts_per_refill)
    if replica.together:
        slot_K, row_M = state.queued + jnp.arange(shape.refill), prompt_M
    else:
        active_S = replica.active(state)
        read_U = jnp.zeros(shape.prompt_rows, bool).at[state.slots.row].max(active_S)
        first = lambda free, count: jnp.argsort(~free, stable=True)[:count].astype(jnp.int32)
        slot_K, row_M = first(~active_S, shape.refill), first(~read_U, shape.prompts_per_refill)
    row_M = jnp.where(prompt_M < len(replica.tokens_PW), row_M, shape.prompt_rows)
    return Admission(slot_K, row_M, jnp.int32(0), state.admission.last)


def _admit(replica: Replica, state: State, now: jax.Array) -> State:
    """Draw the first token of K requests from their prompts' last hidden states, and let them run."""
    shape, requests, admission = replica.shape, replica.requests, state.admission
    source_K = jnp.arange(shape.refill) // shape.group  # all 0 when a refill is part of a group
    request_K = state.queued + jnp.arange(shape.refill)
    known_K = jnp.minimum(request_K, replica.N - 1)
    first_K = jnp.zeros_like(known_K)
    queued_K = now & (request_K < replica.N)
    admitted_K = queued_K & (requests.limits[known_K] > 0)
    logits_KV, history = replica.decoder.logits(admission.last)[source_K], replica.no_history(known_K)
    begins_K = admitted_K if requests.partial is None else admitted_K & (requests.partial.lengths[known_K] == 0)
    samples, drawn, history, done_K = replica.next_token(state.samples, logits_KV, known_K, first_K, history, begins_K)
    request_K = jnp.where(admitted_K & ~done_K, request_K, replica.N)
    fresh = Slots(request_K, admission.row[source_K], first_K + 1, drawn.token, history)
    to_K = jnp.where(queued_K, admission.slot, shape.slots)
    state, fresh = _going_on(replica, state, fresh, known_K, to_K)
    return state._replace(
        slots=jax.tree.map(lambda old_S, new_K: old_S.at[to_K].set(new_K, mode="drop"), state.slots, fresh),
        queued=jnp.where(now, jnp.minimum(state.queued + shape.refill, replica.N), state.queued),
        samples=samples._replace(refills=samples.refills + now),
    )


def _going_on(replica: Replica, state: State, fresh: Slots, known_K: jax.Array, to_K: jax.Array) -> tuple[State, Slots]:
    """Requests that an earlier rollout began, where it left them: the cache of slots `to` and what these hold."""
    begun, shape = replica.requests.partial, replica.shape
    if begun is None:
        return state, fresh
    before_K, tokens_KR = begun.lengths[known_K], begun.tokens[known_K]
    last_K = tokens_KR[jnp.arange(shape.refill), jnp.maximum(before_K - 1, 0)]
    history = partial.remembered(replica.no_history(known_K), tokens_KR, before_K, replica.automaton)
    length_K = replica.requests.lengths[known_K // shape.group]
    todo_K = jnp.where(fresh.request < replica.N, jnp.maximum(before_K - 1, 0), 0)
    who = partial.Returning(to_K, fresh.row, length_K, tokens_KR, todo_K)
    piece = min(shape.piece, shape.max_new)
    together = max(1, min(shape.refill, PREFILL_TOKENS // piece))
    cache = partial.catch_up(replica.decoder, replica.weights, state.cache, state.clock, who, piece, together)
    returning = fresh._replace(sampled=before_K, token=last_K, history=history)
    return state._replace(cache=cache), partial.chosen(before_K > 0, returning, fresh)
