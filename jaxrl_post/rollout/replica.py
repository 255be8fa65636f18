"""One data replica's rollout while it is traced: its state, and what no step of it changes.

N requests (P prompts × G samples each, in prompt order), S slots, K slots and M prompts of a refill, W prompt width,
V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.models.decoder import Decoder
from jaxrl_post.models.moe import record_dtype
from jaxrl_post.rollout import cache as caches
from jaxrl_post.rollout.cache import Caches
from jaxrl_post.rollout.logits import History, extend, no_history, shaped, stopped
from jaxrl_post.rollout.records import Requests, Samples, no_samples, record
from jaxrl_post.rollout.sampling import Draw, Sampling, draw, likeliest, uniforms
from jaxrl_post.rollout.schedule import EngineShape
from jaxrl_post.rollout.stop_strings import Automaton


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


class Replica:
    """What steps read and none changes: the weights, the requests and how they are decoded."""

    def __init__(
        self, decoder: Decoder, shape: EngineShape, requests: Requests, automaton: Automaton | None, step: jax.Array
    ):
        self.decoder, self.shape, self.requests, self.automaton, self.step = decoder, shape, requests, automaton, step
        self.N = requests.ids.shape[0]
        self.together = shape.slots == self.N
        self.weights = decoder.unrolled() if shape.unrolled else decoder.stacked()
        columns = shape.pieces * shape.piece
        self.tokens_PW = jnp.pad(requests.tokens, ((0, 0), (0, columns - shape.width)))

    def start(self) -> State:
        """All slots free, all requests waiting."""
        shape, config = self.shape, self.decoder.config
        ints = lambda *size: jnp.zeros(size, jnp.int32)
        return State(
            cache=caches.empty_cache(
                config, shape.unrolled, shape.prompt_rows, self.tokens_PW.shape[1], shape.slots, shape.chunks
            ),
            slots=Slots(
                jnp.full((shape.slots,), self.N, jnp.int32), ints(shape.slots), ints(shape.slots), ints(shape.slots),
                self.no_history(ints(shape.slots)),
            ),
            admission=Admission(
                ints(shape.refill), ints(shape.prompts_per_refill), jnp.int32(0),
                jnp.zeros((shape.prompts_per_refill, config.hidden_size), config.dtype),
            ),
            queued=jnp.int32(0),
            clock=jnp.int32(0),
            samples=self._no_choices(no_samples(self.N, shape.max_new, shape.top_logprobs, self.requests.partial)),
        )  # fmt: skip

    def active(self, state: State) -> jax.Array:
        """Which slots run, bool [S]."""
        return state.slots.request < self.N

    def no_history(self, request_X: jax.Array) -> History:
        """Of requests that have sampled nothing."""
        prompt_X = request_X // self.shape.group
        return no_history(
            self.tokens_PW[prompt_X], self.requests.lengths[prompt_X], self.requests.options, self.shape.features,
            self.decoder.config.vocab_size, self.shape.max_new,
        )  # fmt: skip

    def next_token(
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

    def _no_choices(self, samples: Samples) -> Samples:
        """With room for the experts of each token, where they are recorded."""
        moe, (P, columns), R = self.decoder.config.moe, self.tokens_PW.shape, self.shape.max_new
        if not self.shape.routing or moe is None:
            return samples
        empty = lambda *rows: jnp.zeros((*rows, self.decoder.config.layers, moe.per_token), record_dtype(moe.count))
        return samples._replace(choices=empty(self.N, R), prompt_choices=empty(P, columns))
