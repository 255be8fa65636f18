"""Rollouts that stop before all is sampled, and samples that go on where an earlier rollout left them.

As partial rollouts in Kimi k1.5 (arXiv:2501.12599), slime and verl, but decided inside the rollout's program: each data
replica counts what has finished. A sample that goes on keeps its ids and log-probs; the keys and values of its tokens
are computed anew, as the weights have changed, and lie in the response columns just before the clock: a slot that has
sampled n tokens sees the last n columns, whoever wrote them.

N requests, P prompts of G samples, R response limit, K requests of a refill, J of them in one forward pass, B columns
of a piece, C = R response columns, W prompt columns, H query heads, K of `k` and `v` key/value heads, D per-head width,
n likeliest ids of a place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_post.models.decoder import Decoder
from jaxrl_post.rollout import cache as caches
from jaxrl_post.rollout.cache import Cache, Caches
from jaxrl_post.rollout.logits import History, extend
from jaxrl_post.rollout.stop_strings import Automaton
from jaxrl_post.types import Completion, StopReason

Of = Literal["samples", "groups"]


@dataclasses.dataclass(frozen=True)
class Start:
    """Where one request begins. `seed`, `step` and `request` key its draws and stay with it until it has finished.

    so_far: what earlier rollouts sampled of it; with a stop reason other than UNFINISHED nothing is added. urgent: the
    rollout does not stop before this request has finished.
    """

    seed: int
    step: int
    request: int
    so_far: Completion | None = None
    urgent: bool = False

    @property
    def done(self) -> bool:
        return self.so_far is not None and self.so_far.stop is not StopReason.UNFINISHED


@dataclasses.dataclass(frozen=True)
class Partial:
    """A rollout that stops when `finish_fraction` of the samples it is asked for, or of their groups, have finished on
    a data replica, one group is whole there, and so are all urgent samples. `starts` are those of the N requests."""

    finish_fraction: float
    of: Of
    starts: Sequence[Start]


class Begun(NamedTuple):
    """What the program knows of the starts. tokens int32, logp and raw_logp float32 [N, R]; lengths, stops int32 [N]:
    as in `Samples`; steps int32 [N], policy steps that key the draws; urgent bool [N]; quota int32 [1] a replica: so
    many samples or groups are enough. top_ids int32 and top_logp float32 [N, R, n]; None where none are asked for."""

    tokens: Any
    logp: Any
    raw_logp: Any
    lengths: Any
    stops: Any
    steps: Any
    urgent: Any
    quota: Any
    top_ids: Any = None
    top_logp: Any = None


def beginnings(
    partial: Partial, tops: Sequence[int], count: int, group: int, max_new: int, replicas: int
) -> tuple[Begun, np.ndarray]:
    """Arrays for `count` requests, those beyond the starts asking for nothing, and the limits int32 [N] that follow.

    `tops` are how many likeliest ids each start asks for. Raises: ValueError where what is there has fewer.
    """
    rows = [start.so_far for start in partial.starts]
    lengths_N, stops_N = np.zeros(count, np.int32), np.zeros(count, np.int32)
    tokens_NR = np.zeros((count, max_new), np.int32)
    logp_NR, raw_logp_NR = np.zeros((2, count, max_new), np.float32)
    steps_N, urgent_N, live_N = np.zeros(count, np.int32), np.zeros(count, bool), np.zeros(count, bool)
    for i, (start, row) in enumerate(zip(partial.starts, rows, strict=True)):
        steps_N[i], urgent_N[i], live_N[i] = start.step, start.urgent, not start.done
        if row is not None:
            n = len(row.ids)
            lengths_N[i], stops_N[i] = n, row.stop if start.done else 0
            tokens_NR[i, :n], logp_NR[i, :n], raw_logp_NR[i, :n] = row.ids, row.logp, row.raw_logp
    quota = quotas(live_N, group, partial, replicas)
    limits_N = np.where(live_N, max_new, 0).astype(np.int32)
    likely = _likely(rows, tops, count, max_new) if any(tops) else (None, None)
    return Begun(tokens_NR, logp_NR, raw_logp_NR, lengths_N, stops_N, steps_N, urgent_N, quota, *likely), limits_N


def _likely(
    rows: Sequence[Completion | None], tops: Sequence[int], count: int, max_new: int
) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest ids and their log-probs that are there, [N, R, n]."""
    size = (count, max_new, max(tops))
    ids_NRn, logp_NRn = np.zeros(size, np.int32), np.zeros(size, np.float32)
    for i, (row, top) in enumerate(zip(rows, tops, strict=True)):
        if row is None or not len(row.ids) or not top:
            continue
        known = 0 if row.top_ids is None else row.top_ids.shape[1]
        if row.top_ids is None or row.top_logp is None or known < top:
            raise ValueError(
                f"request {i} goes on with top_logprobs={top}, and its {len(row.ids)} tokens were sampled with "
                f"top_logprobs={known}: ask for {known} at most, or for {top} from its first rollout on"
            )
        at = np.s_[i, : len(row.ids), :top]
        ids_NRn[at], logp_NRn[at] = row.top_ids[:, :top], row.top_logp[:, :top]
    return ids_NRn, logp_NRn


def quotas(live_N: np.ndarray, group: int, partial: Partial, replicas: int) -> np.ndarray:
    """int32 [replicas]: the fraction of each replica's live samples, or of groups with any, rounded up."""
    live_XG = live_N.reshape(-1, group)
    counted = live_N if partial.of == "samples" else live_XG.any(axis=1)
    wanted = partial.finish_fraction * counted.reshape(replicas, -1).sum(axis=1)
    return np.array([math.ceil(round(x, 6)) for x in wanted], np.int32)


def enough(begun: Begun, of: Of, group: int, limits_N: jax.Array, stops_N: jax.Array) -> jax.Array:
    """Whether a replica's rollout may stop, a bool scalar."""
    asked_N, finished_N = limits_N > 0, stops_N > 0
    done_N = finished_N | ~asked_N
    whole_P = done_N.reshape(-1, group).all(axis=1) & asked_N.reshape(-1, group).any(axis=1)
    finished = (asked_N & finished_N).sum() if of == "samples" else whole_P.sum()
    return (finished >= begun.quota[0]) & whole_P.any() & (done_N | ~begun.urgent).all()


def remembered(history: History, tokens_KR: jax.Array, before_K: jax.Array, automaton: Automaton | None) -> History:
    """What penalties and stop strings remember of sequences after the first `before` of these tokens."""

    read = lambda j, history: chosen(j < before_K, extend(history, tokens_KR[:, j], automaton)[0], history)
    return lax.fori_loop(0, before_K.max(), read, history)


def chosen(first_K: jax.Array, one: Any, other: Any) -> Any:
    """Rows of one tree of arrays or of the other."""
    return jax.tree.map(lambda a, b: jnp.where(first_K.reshape(-1, *[1] * (a.ndim - 1)), a, b), one, other)


class Returning(NamedTuple):
    """Requests that go on, [K]: their slots, their prompts' rows and lengths, tokens sampled before, int32 [K, R], and
    how many of these need keys and values: all but the last, which the next decode step reads; 0 for a new request."""

    slot: jax.Array
    row: jax.Array
    length: jax.Array
    tokens: jax.Array
    todo: jax.Array


def catch_up(
    decoder: Decoder, weights: Any, cache: Caches, clock: jax.Array, who: Returning, piece: int, together: int
) -> Caches:
    """The cache with keys and values of what was sampled before, `together` requests at a time, in pieces of B tokens.

    The longest come first, so that a batch takes the pieces of its longest and new requests cost nothing.
    """
    K = len(who.todo)
    who = jax.tree.map(lambda x: x[jnp.argsort(-who.todo, stable=True)], who)
    pad = ((0, 0), (0, -who.tokens.shape[1] % piece))

    def more(carry: tuple[jax.Array, jax.Array, Caches]) -> jax.Array:
        first = carry[0]
        return (first < K) & (who.todo[jnp.minimum(first, K - 1)] > 0)

    def step(carry: tuple[jax.Array, jax.Array, Caches]) -> tuple[jax.Array, jax.Array, Caches]:
        first, start, cache = carry
        batch = jax.tree.map(lambda x: x[jnp.minimum(first + jnp.arange(together), K - 1)], who)
        batch = batch._replace(todo=jnp.where(first + jnp.arange(together) < K, batch.todo, 0))
        token_JB = lax.dynamic_slice_in_dim(jnp.pad(batch.tokens, pad), start, piece, axis=1)
        position_JB = batch.length[:, None] + start + jnp.arange(piece)[None]
        attention = functools.partial(attend_returning, batch, clock, start)
        _, cache = decoder.through(weights, token_JB, position_JB, cache, attention)
        done = start + piece >= batch.todo[0]
        return jnp.where(done, first + together, first), jnp.where(done, 0, start + piece), cache

    return lax.while_loop(more, step, (jnp.int32(0), jnp.int32(0), cache))[2]


def attend_returning(
    who: Returning,
    clock: jax.Array,
    start: jax.Array,
    cache: Cache,
    i: jax.Array | None,
    q_JBHD: jax.Array,
    k_JBKD: jax.Array,
    v_JBKD: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Attention of tokens start … start+B-1 to their prompts and to the tokens up to each; writes theirs first.

    Token j of a request with `todo` of them lies in column clock - todo + j, counted round and round.
    """
    B, H, K, (old,) = *q_JBHD.shape[1:3], k_JBKD.shape[2], cache.responses
    C, index_B = old.columns, start + jnp.arange(B)
    first_J1 = (clock - who.todo)[:, None]
    column_JB = jnp.where(index_B[None] < who.todo[:, None], (first_J1 + index_B[None]) % C, C)
    own = caches.set_columns(old, i, who.slot[:, None], column_JB, k_JBKD, v_JBKD)
    prompt_JW = jnp.arange(cache.prompts.columns)[None] < who.length[:, None]
    seen_JBC = ((jnp.arange(C)[None] - first_J1) % C)[:, None] <= index_B[None, :, None]
    parts = [
        (*caches.rows_of(cache.prompts, i, who.row), prompt_JW[:, None, None]),
        (*caches.rows_of(own, i, who.slot), jnp.repeat(seen_JBC, H // K, axis=1)[:, None]),
    ]
    return caches.attend_heads(q_JBHD, parts, caches.key_axis(i)), cache._replace(responses=(own,))


def with_versions(completions: Sequence[Completion], partial: Partial, step: int) -> list[Completion]:
    """The completions with the policy step of each token: those that earlier rollouts sampled keep theirs."""

    def versioned(completion: Completion, before: Completion | None) -> Completion:
        old = np.zeros(0, np.int32) if before is None or before.versions is None else before.versions
        new = np.full(len(completion.ids) - len(old), step, np.int32)
        return dataclasses.replace(completion, versions=np.concatenate([old, new]))

    return [versioned(c, start.so_far) for c, start in zip(completions, partial.starts, strict=True)]
