"""The rollout engine: a whole rollout is one XLA program.

N requests (P prompts × G samples each, in prompt order) wait in a queue; S slots hold running sequences. The program
is a few loops, one after the other, each with static shapes:

    fill    while requests wait: refill K free slots, then decode until K slots are free again
    drain   for S, S/2, S/4 … slots: pack the running sequences into that many slots, decode until half are done

A refill runs its prompts through the model in pieces of B columns and keeps each prompt's keys and values once, for all
of its samples. With a slot for every request (S = N) the clock starts at 0 for all, so a step reads the cache up to the
clock, in tiers of columns: a loop for each. With fewer slots the columns are a ring of R and each step reads them all.

No `lax.cond` touches the cache, so XLA updates it in place. Each data replica runs its own loops on its own share of
the requests (`shard_map` over the batch axes); tensor axes are left to the compiler.

W prompt width, R response limit, V vocabulary, M prompts of a refill, U prompt rows, B columns of a prefill piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_post.models.decoder import Decoder, Params
from jaxrl_post.models.moe import EXPERT, record_dtype
from jaxrl_post.rollout import cache as caches
from jaxrl_post.rollout import decode_kernel, partial
from jaxrl_post.rollout.cache import Caches
from jaxrl_post.rollout.logits import History, extend, no_history, shaped, stopped
from jaxrl_post.rollout.records import Requests, Samples, keep_choices, keep_prompt_choices, no_samples, record
from jaxrl_post.rollout.sampling import Draw, Sampling, draw, likeliest, uniforms
from jaxrl_post.rollout.schedule import PREFILL_TOKENS, EngineShape
from jaxrl_post.rollout.stop_strings import Automaton
from sharding.mesh import BATCH_AXES

WHOLE = PartitionSpec()


class Slots(NamedTuple):
    """[S]: the running request (N = free), its prompt's row in the cache, tokens it has sampled, the last of them; and
    what penalties and stop strings remember of it."""

    request: jax.Array
    row: jax.Array
    sampled: jax.Array
    token: jax.Array
    history: History


class Admission(NamedTuple):
    """A refill under way: the slots [K] and prompt rows [M] it fills, pieces done, and what it has seen of the last
    hidden states [M, D]."""

    slot: jax.Array
    row: jax.Array
    pieces: jax.Array
    last: jax.Array


class State(NamedTuple):
    """`queued` requests have left the queue, `clock` counts decode steps; of unrolled layers each has its cache."""

    cache: Caches
    slots: Slots
    admission: Admission
    queued: jax.Array
    clock: jax.Array
    samples: Samples


def make_rollout(
    graphdef: nnx.GraphDef, shape: EngineShape, mesh: Mesh, weight_specs: Any = WHOLE
) -> Callable[..., Samples]:
    """Compile-once `rollout(params, requests, automaton, step) -> Samples`.

    params: the training tree, laid out by rules whose weights are whole on every replica, but for what `weight_specs`
    (`models.moe.replica_specs`) cut: replicas that share experts run their steps together. requests: arrays with the
    leading axis a multiple of the number of replicas. automaton: of the stop strings, None where no request has any.
    step: int32, the policy step.
    """
    sharded = PartitionSpec(BATCH_AXES)

    def run(params: Params, requests: Requests, automaton: Automaton | None, step: jax.Array) -> Samples:
        return Engine(nnx.merge(graphdef, params), shape, requests, automaton, step).run()

    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(weight_specs, sharded, WHOLE, WHOLE),
            out_specs=sharded,
            axis_names=set(BATCH_AXES),
            check_vma=False,
        )
    )


class Engine:
    """One replica's rollout while it is traced: what no step changes, and the steps as functions of `State`."""

    def __init__(
        self,
        decoder: Decoder,
        shape: EngineShape,
        requests: Requests,
        automaton: Automaton | None,
        step: jax.Array,
        until: jax.Array | None = None,
    ):
        """`until`, of a rollout in several programs: this one ends when so few requests are left unfinished."""
        self.decoder, self.shape, self.requests, self.automaton, self.step = decoder, shape, requests, automaton, step
        self.until = until
        self.N = requests.ids.shape[0]
        self.together = shape.slots == self.N
        self.weights = decoder.unrolled() if shape.unrolled else decoder.stacked()
        self.agreeing = BATCH_AXES if shape.lockstep else (EXPERT,) if decoder.shares_experts() else ()
        columns = shape.pieces * shape.piece
        self.tokens_PW = jnp.pad(requests.tokens, ((0, 0), (0, columns - shape.width)))

    def run(self) -> Samples:
        state = self.start()
        for phase in range(len(self.shape.phases)):
            state = self.advance(phase, state)
        return state.samples

    def advance(self, phase: int, state: State) -> State:
        """One phase of the drain, the first after the filling; one that has ended early goes on when called again."""
        if phase == 0:
            state = lax.while_loop(self._waiting, self._fill, state)
        slots, ends = self.shape.phases[phase]
        enough = (*self.shape.drain[1:], 0)[phase]
        state = self._pack(state, slots)
        for end in ends:
            running = functools.partial(self._running, enough, end)
            state = lax.while_loop(running, functools.partial(self._decode, end), state)
        return state

    def start(self) -> State:
        shape, config = self.shape, self.decoder.config
        ints = lambda *size: jnp.zeros(size, jnp.int32)
        return State(
            cache=caches.empty_cache(
                config, shape.unrolled, shape.prompt_rows, self.tokens_PW.shape[1], shape.slots, shape.chunks
            ),
            slots=Slots(
                jnp.full((shape.slots,), self.N, jnp.int32), ints(shape.slots), ints(shape.slots), ints(shape.slots),
                self._no_history(ints(shape.slots)),
            ),
            admission=Admission(
                ints(shape.refill), ints(shape.prompts_per_refill), jnp.int32(0),
                jnp.zeros((shape.prompts_per_refill, config.hidden_size), config.dtype),
            ),
            queued=jnp.int32(0),
            clock=jnp.int32(0),
            samples=self._no_choices(no_samples(self.N, shape.max_new, shape.top_logprobs, self.requests.partial)),
        )  # fmt: skip

    # Conditions of the loops. Replicas in lockstep all go on while any of them would: all there are, or those that
    # share experts.

    def _agreed(self, wanted: jax.Array) -> jax.Array:
        return lax.pmax(wanted.astype(jnp.int32), self.agreeing) > 0 if self.agreeing else wanted

    def _active(self, state: State) -> jax.Array:
        return state.slots.request < self.N

    def _open(self, state: State) -> jax.Array:
        """Whether there is more to do for this replica, were any of its requests left."""
        begun, requests, shape = self.requests.partial, self.requests, self.shape
        if begun is None or shape.partial is None:
            return jnp.bool(True)
        return ~partial.enough(begun, shape.partial, shape.group, requests.limits, state.samples.stops)

    def _goes_on(self, state: State) -> jax.Array:
        """Whether this program is to come to its end, or more than `until` requests are unfinished."""
        if self.until is None:
            return jnp.bool(True)
        return self.N - state.queued + self._active(state).sum() > self.until

    def _waiting(self, state: State) -> jax.Array:
        return self._agreed((state.queued < self.N) & self._open(state) & self._goes_on(state))

    def _running(self, enough: int, end: int, state: State) -> jax.Array:
        """More than `enough` sequences run, and the clock has not come to the tier's last column."""
        more = self._agreed((self._active(state).sum() > enough) & self._open(state) & self._goes_on(state))
        return more if end == self.shape.max_new else more & (state.clock < end)

    def _full(self, state: State) -> jax.Array:
        """Requests wait and fewer than K slots are free."""
        active_S = self._active(state)
        full = (state.queued < self.N) & ((~active_S).sum() < self.shape.refill)
        return self._agreed(full & self._open(state))

    # Steps.

    def _fill(self, state: State) -> State:
        state = self._refill(state)
        if self.together:
            return state
        pending = state.admission.pieces > 0
        more = lambda carry: self._full(carry[0]) | (carry[1] & self._agreed(self._active(carry[0]).any()))
        return lax.while_loop(
            more, lambda carry: (self._decode(self.shape.max_new, carry[0]), jnp.bool(False)), (state, pending)
        )[0]

    def _refill(self, state: State) -> State:
        """One more piece of the next M prompts; after the last one K requests start in the slots set aside for them."""
        shape, requests = self.shape, self.requests
        start = state.admission.pieces == 0
        admission = jax.tree.map(lambda new, old: jnp.where(start, new, old), self._admission(state), state.admission)
        prompt_M = jnp.minimum(
            state.queued // shape.group + jnp.arange(shape.prompts_per_refill), len(self.tokens_PW) - 1
        )
        begin = admission.pieces * shape.piece
        token_MB = lax.dynamic_slice_in_dim(self.tokens_PW[prompt_M], begin, shape.piece, axis=1)
        position_MB = jnp.broadcast_to(begin + jnp.arange(shape.piece), token_MB.shape)
        attention = functools.partial(caches.attend_prompt, begin, admission.row)
        x_MBD, cache, choices_LMBk = self.decoder.routed_through(
            self.weights, token_MB, position_MB, state.cache, attention
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
        return self._admit(state, done)

    def _no_choices(self, samples: Samples) -> Samples:
        """With room for the experts of each token, where they are recorded."""
        moe, (P, columns), R = self.decoder.config.moe, self.tokens_PW.shape, self.shape.max_new
        if not self.shape.routing or moe is None:
            return samples
        empty = lambda *rows: jnp.zeros((*rows, self.decoder.config.layers, moe.per_token), record_dtype(moe.count))
        return samples._replace(choices=empty(self.N, R), prompt_choices=empty(P, columns))

    def _admission(self, state: State) -> Admission:
        """K free slots and M prompt rows that no running slot reads; no row for what is beyond the queue.

        With a slot for every request these are the next ones, so that slots stay in the order of the prompts.
        """
        shape = self.shape
        prompt_M = state.queued // shape.group + jnp.arange(shape.prompts_per_refill)
        if self.together:
            slot_K, row_M = state.queued + jnp.arange(shape.refill), prompt_M
        else:
            active_S = self._active(state)
            read_U = jnp.zeros(shape.prompt_rows, bool).at[state.slots.row].max(active_S)
            first = lambda free, count: jnp.argsort(~free, stable=True)[:count].astype(jnp.int32)
            slot_K, row_M = first(~active_S, shape.refill), first(~read_U, shape.prompts_per_refill)
        row_M = jnp.where(prompt_M < len(self.tokens_PW), row_M, shape.prompt_rows)
        return Admission(slot_K, row_M, jnp.int32(0), state.admission.last)

    def _admit(self, state: State, now: jax.Array) -> State:
        """Draw the first token of K requests from their prompts' last hidden states, and let them run."""
        shape, requests, admission = self.shape, self.requests, state.admission
        source_K = jnp.arange(shape.refill) // shape.group  # all 0 when a refill is part of a group
        request_K = state.queued + jnp.arange(shape.refill)
        known_K = jnp.minimum(request_K, self.N - 1)
        first_K = jnp.zeros_like(known_K)
        queued_K = now & (request_K < self.N)
        admitted_K = queued_K & (requests.limits[known_K] > 0)
        logits_KV, history = self.decoder.logits(admission.last)[source_K], self._no_history(known_K)
        begins_K = admitted_K if requests.partial is None else admitted_K & (requests.partial.lengths[known_K] == 0)
        samples, drawn, history, done_K = self._next(state.samples, logits_KV, known_K, first_K, history, begins_K)
        request_K = jnp.where(admitted_K & ~done_K, request_K, self.N)
        fresh = Slots(request_K, admission.row[source_K], first_K + 1, drawn.token, history)
        to_K = jnp.where(queued_K, admission.slot, shape.slots)
        state, fresh = self._going_on(state, fresh, known_K, to_K)
        return state._replace(
            slots=jax.tree.map(lambda old_S, new_K: old_S.at[to_K].set(new_K, mode="drop"), state.slots, fresh),
            queued=jnp.where(now, jnp.minimum(state.queued + shape.refill, self.N), state.queued),
            samples=samples._replace(refills=samples.refills + now),
        )

    def _going_on(self, state: State, fresh: Slots, known_K: jax.Array, to_K: jax.Array) -> tuple[State, Slots]:
        """Requests that an earlier rollout began, where it left them: the cache of slots `to` and what these hold."""
        begun, shape = self.requests.partial, self.shape
        if begun is None:
            return state, fresh
        before_K, tokens_KR = begun.lengths[known_K], begun.tokens[known_K]
        last_K = tokens_KR[jnp.arange(shape.refill), jnp.maximum(before_K - 1, 0)]
        history = partial.remembered(self._no_history(known_K), tokens_KR, before_K, self.automaton)
        length_K = self.requests.lengths[known_K // shape.group]
        todo_K = jnp.where(fresh.request < self.N, jnp.maximum(before_K - 1, 0), 0)
        who = partial.Returning(to_K, fresh.row, length_K, tokens_KR, todo_K)
        piece = min(shape.piece, shape.max_new)
        together = max(1, min(shape.refill, PREFILL_TOKENS // piece))
        cache = partial.catch_up(self.decoder, self.weights, state.cache, state.clock, who, piece, together)
        returning = fresh._replace(sampled=before_K, token=last_K, history=history)
        return state._replace(cache=cache), partial.chosen(before_K > 0, returning, fresh)

    def _decode(self, end: int, state: State) -> State:
        """One more token for every running slot, from the first `end` columns of the cache."""
        shape, requests, slots = self.shape, self.requests, state.slots
        active_S, known_S = self._active(state), jnp.minimum(slots.request, self.N - 1)
        length_S = requests.lengths[known_S // shape.group]
        position_S1 = (length_S + slots.sampled - 1)[:, None]
        attention = self._attention(state, end, active_S, length_S)
        x_S1D, cache, choices_LS1k = self.decoder.routed_through(
            self.weights, slots.token[:, None], position_S1, state.cache, attention
        )
        logits_SV = self.decoder.logits(x_S1D[:, 0])
        samples, drawn, history, done_S = self._next(
            state.samples, logits_SV, known_S, slots.sampled, slots.history, active_S
        )
        return state._replace(
            cache=cache,
            slots=Slots(
                jnp.where(done_S, self.N, slots.request), slots.row, slots.sampled + active_S, drawn.token, history
            ),
            clock=state.clock + 1,
            samples=keep_choices(samples, choices_LS1k, slots.request, slots.sampled - 1)._replace(
                decode_steps=samples.decode_steps + 1
            ),
        )

    def _attention(self, state: State, end: int, active_S: jax.Array, length_S: jax.Array) -> Callable[..., Any]:
        """Of a decode step that reads the response columns before `end`, as `Decoder.through` takes it."""
        slots, shape = state.slots, self.shape
        if shape.attention != "xla":
            column = state.clock % shape.max_new
            seen = decode_kernel.Seen(slots.row, jnp.where(active_S, length_S, 0), slots.sampled, column)
            return functools.partial(decode_kernel.attend, seen, shape.attention == "interpreted")
        in_order = self.together and len(slots.row) == self.N
        row_S = None if in_order else slots.row
        step = caches.decode_step(state.cache, end, state.clock, row_S, length_S, slots.sampled)
        return functools.partial(caches.attend_cache, step)

    def _pack(self, state: State, slots: int) -> State:
        """The running sequences in the first `slots` slots; there are no more of them than that."""
        if slots == len(state.slots.request):
            return state
        slot_S = jnp.argsort(~self._active(state), stable=True)[:slots]
        return state._replace(
            cache=caches.pack(state.cache, slot_S),
            slots=jax.tree.map(lambda x: x[slot_S], state.slots),
        )

    def _no_history(self, request_X: jax.Array) -> History:
        prompt_X = request_X // self.shape.group
        return no_history(
            self.tokens_PW[prompt_X], self.requests.lengths[prompt_X], self.requests.options, self.shape.features,
            self.decoder.config.vocab_size, self.shape.max_new,
        )  # fmt: skip

    def _next(
        self,
        samples: Samples,
        logits_XV: jax.Array,
        request_X: jax.Array,
        count_X: jax.Array,
        history: History,
        live_X: jax.Array,
    ) -> tuple[Samples, Draw, History, jax.Array]:
        """Draw token number `count` of each request and write the live ones down; tell which requests are done."""
        requests, features = self.requests, self.shape.features
        options: Sampling = jax.tree.map(lambda x: x[request_X], requests.options)
        step = self.step if requests.partial is None else requests.partial.steps[request_X]
        uniform_X2 = uniforms(requests.seeds[request_X], step, requests.ids[request_X], count_X)
        shaped_XV = shaped(logits_XV, options, history, count_X, features) if features.shapes_logits else None
        drawn = draw(logits_XV, options, uniform_X2, features, shaped_XV)
        history, completed_X = extend(history, drawn.token, self.automaton)
        stopped_X = stopped(options, drawn.token, completed_X, count_X)
        likely = likeliest(logits_XV, self.shape.top_logprobs) if self.shape.top_logprobs else None
        samples, done_X = record(samples, requests, drawn, stopped_X, likely, request_X, count_X, live_X)
        return samples, drawn, history, done_X
