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

R response limit, K slots of a refill, B columns of a prefill piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_post.models.decoder import Decoder, Params
from jaxrl_post.models.placement import EXPERT
from jaxrl_post.rollout import partial
from jaxrl_post.rollout.decode import decode, pack
from jaxrl_post.rollout.records import Requests, Samples
from jaxrl_post.rollout.refill import refill
from jaxrl_post.rollout.replica import Replica, State
from jaxrl_post.rollout.schedule import EngineShape
from jaxrl_post.rollout.stop_strings import Automaton
from sharding.mesh import BATCH_AXES

WHOLE = PartitionSpec()


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
    """The loops of one replica's rollout, while it is traced."""

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
        self.replica, self.until = Replica(decoder, shape, requests, automaton, step), until
        self.agreeing = BATCH_AXES if shape.lockstep else (EXPERT,) if decoder.shares_experts() else ()

    def run(self) -> Samples:
        state = self.replica.start()
        for phase in range(len(self.replica.shape.phases)):
            state = self.advance(phase, state)
        return state.samples

    def advance(self, phase: int, state: State) -> State:
        """One phase of the drain, the first after the filling; one that has ended early goes on when called again."""
        if phase == 0:
            state = lax.while_loop(self._waiting, self._fill, state)
        shape = self.replica.shape
        slots, ends = shape.phases[phase]
        enough = (*shape.drain[1:], 0)[phase]
        state = pack(self.replica, state, slots)
        for end in ends:
            running = functools.partial(self._running, enough, end)
            state = lax.while_loop(running, functools.partial(decode, self.replica, end), state)
        return state

    def _fill(self, state: State) -> State:
        """A piece of a refill; then, where requests have to wait for slots, decode steps until these are free."""
        state = refill(self.replica, state)
        if self.replica.together:
            return state
        step = functools.partial(decode, self.replica, self.replica.shape.max_new)
        pending = state.admission.pieces > 0
        more = lambda carry: self._full(carry[0]) | (carry[1] & self._agreed(self.replica.active(carry[0]).any()))
        return lax.while_loop(more, lambda carry: (step(carry[0]), jnp.bool(False)), (state, pending))[0]

    # Conditions of the loops. Replicas in lockstep all go on while any of them would: all there are, or those that
    # share experts.

    def _agreed(self, wanted: jax.Array) -> jax.Array:
        return lax.pmax(wanted.astype(jnp.int32), self.agreeing) > 0 if self.agreeing else wanted

    def _open(self, state: State) -> jax.Array:
        """Whether there is more to do for this replica, were any of its requests left."""
        requests, shape = self.replica.requests, self.replica.shape
        if requests.partial is None or shape.partial is None:
            return jnp.bool(True)
        return ~partial.enough(requests.partial, shape.partial, shape.group, requests.limits, state.samples.stops)

    def _goes_on(self, state: State) -> jax.Array:
        """Whether this program is to come to its end, or more than `until` requests are unfinished."""
        if self.until is None:
            return jnp.bool(True)
        return self.replica.N - state.queued + self.replica.active(state).sum() > self.until

    def _waiting(self, state: State) -> jax.Array:
        return self._agreed((state.queued < self.replica.N) & self._open(state) & self._goes_on(state))

    def _running(self, enough: int, end: int, state: State) -> jax.Array:
        """More than `enough` sequences run, and the clock has not come to the tier's last column."""
        more = self._agreed((self.replica.active(state).sum() > enough) & self._open(state) & self._goes_on(state))
        return more if end == self.replica.shape.max_new else more & (state.clock < end)

    def _full(self, state: State) -> jax.Array:
        """Requests wait and fewer than K slots are free."""
        active_S = self.replica.active(state)
        full = (state.queued < self.replica.N) & ((~active_S).sum() < self.replica.shape.refill)
        return self._agreed(full & self._open(state))
