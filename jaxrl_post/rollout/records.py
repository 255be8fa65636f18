"""What a rollout is asked for and what it writes down. N requests, P prompts, W prompt width, R response limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.rollout.partial import Begun, Partial, beginnings
from jaxrl_post.rollout.sampling import Draw, Sampling
from jaxrl_post.types import Completion, StopReason


class Requests(NamedTuple):
    """What to sample. Per prompt: tokens int32 [P, W] right-padded, lengths int32 [P] ≥ 1. Per request, in prompt
    order: ids int32 [N] (key the draws), seeds uint32 [N], limits int32 [N] new tokens (0 samples nothing), and
    `options` [N], stop ids among them. `partial`: where requests go on and when the rollout stops, None where all begin
    and all finish. The padding of the last refill is the engine's business, not the caller's.
    """

    tokens: Any
    lengths: Any
    ids: Any
    seeds: Any
    limits: Any
    options: Sampling
    partial: Begun | None = None


class Samples(NamedTuple):
    """What was sampled: tokens int32 [N, R], logp and raw_logp float32 [N, R], lengths int32 [N], stops int32 [N]
    (`StopReason`, 0 for a request with limit 0). Entries at or beyond a length are 0. `decode_steps` and `refills`
    int32 [1] a replica. top_ids int32 and top_logp float32 [N, R, n], the n likeliest; None where none are asked for.
    choices [N, R, L, k] and prompt_choices [P, W, L, k], `models.moe.record`: the experts of each sampled token, the
    last of a request apart, and of each prompt's; None where they are not recorded.
    """

    tokens: Any
    logp: Any
    raw_logp: Any
    lengths: Any
    stops: Any
    decode_steps: Any
    refills: Any
    top_ids: Any
    top_logp: Any
    choices: Any = None
    prompt_choices: Any = None


def no_samples(N: int, R: int, n: int, begun: Begun | None = None) -> Samples:
    """Nothing sampled yet, or what earlier rollouts did."""
    ints, floats = (lambda *size: jnp.zeros(size, jnp.int32)), (lambda *size: jnp.zeros(size, jnp.float32))
    likely = (ints(N, R, n), floats(N, R, n)) if n else (None, None)
    empty = Samples(ints(N, R), floats(N, R), floats(N, R), ints(N), ints(N), ints(1), ints(1), *likely)
    if begun is None:
        return empty
    kept = ("tokens", "logp", "raw_logp", "lengths", "stops", "top_ids", "top_logp")
    return empty._replace(**{name: getattr(begun, name) for name in kept})


def record(
    samples: Samples,
    requests: Requests,
    drawn: Draw,
    stopped_X: jax.Array,
    likely: tuple[jax.Array, jax.Array] | None,
    request_X: jax.Array,
    count_X: jax.Array,
    live_X: jax.Array,
) -> tuple[Samples, jax.Array]:
    """Write each live row's token as number `count` of its request, the `likely` ids and log-probs [X, n] beside it;
    tell which requests are done, those whose token stops them among them."""
    N = requests.ids.shape[0]
    to_X = jnp.where(live_X, request_X, N)
    full_X = count_X + 1 >= requests.limits[request_X]
    reason_X = jnp.where(stopped_X, StopReason.STOP, jnp.where(full_X, StopReason.LENGTH, 0)).astype(jnp.int32)
    put = lambda old, new: old.at[to_X, count_X].set(new, mode="drop")
    top_ids, top_logp = likely or (None, None)
    recorded = samples._replace(
        tokens=put(samples.tokens, drawn.token),
        logp=put(samples.logp, drawn.logp),
        raw_logp=put(samples.raw_logp, drawn.raw_logp),
        lengths=samples.lengths.at[to_X].set(count_X + 1, mode="drop"),
        stops=samples.stops.at[to_X].set(reason_X, mode="drop"),
        top_ids=None if top_ids is None else put(samples.top_ids, top_ids),
        top_logp=None if top_logp is None else put(samples.top_logp, top_logp),
    )
    return recorded, live_X & (stopped_X | full_X)


def keep_choices(samples: Samples, choices_LS1k: jax.Array | None, request_S: jax.Array, count_S: jax.Array) -> Samples:
    """Write down where token number `count` of each request went; a request of N is none."""
    if samples.choices is None or choices_LS1k is None:
        return samples
    of_token_SLk = jnp.moveaxis(choices_LS1k[:, :, 0], 0, 1)
    return samples._replace(choices=samples.choices.at[request_S, count_S].set(of_token_SLk, mode="drop"))


def keep_prompt_choices(
    samples: Samples, choices_LMBk: jax.Array | None, first: jax.Array, begin: jax.Array
) -> Samples:
    """Write down where the tokens from column `begin` of prompts `first` … `first + M - 1` went; beyond P is none."""
    if samples.prompt_choices is None or choices_LMBk is None:
        return samples
    _, M, B, _ = choices_LMBk.shape
    at = first + jnp.arange(M)[:, None], begin + jnp.arange(B)[None]
    of_prompts = samples.prompt_choices.at[at].set(jnp.moveaxis(choices_LMBk, 0, 2), mode="drop")
    return samples._replace(prompt_choices=of_prompts)


def started(requests: Requests, partial: Partial, tops: Sequence[int], max_new: int, replicas: int) -> Requests:
    """The requests with the keys, limits and beginnings of `partial`, on so many data replicas; `tops` as there."""
    count = len(requests.ids)
    group = count // len(requests.lengths)
    ids, seeds = requests.ids.copy(), requests.seeds.copy()
    ids[: len(partial.starts)] = [start.request for start in partial.starts]
    seeds[: len(partial.starts)] = [start.seed for start in partial.starts]
    begin, limits = beginnings(partial, tops, count, group, max_new, replicas)
    return requests._replace(ids=ids, seeds=seeds, limits=limits, partial=begin)


def with_choices(completions: Sequence[Completion], samples: Samples, length_P: np.ndarray) -> list[Completion]:
    """Each with the experts of its prompt's tokens and of its own but the last."""

    def routed(i: int, c: Completion) -> Completion:
        prompt = samples.prompt_choices[c.prompt, : length_P[c.prompt]]
        return dataclasses.replace(c, choices=np.concatenate([prompt, samples.choices[i, : max(len(c.ids) - 1, 0)]]))

    return [routed(i, c) for i, c in enumerate(completions)]
