"""From lists of prompts and options to the arrays a rollout is asked with.

P prompts, G samples each, N = P·G requests, W prompt width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from jaxrl_post.rollout.decoding import Decoding, sampling_arrays
from jaxrl_post.rollout.records import Requests
from jaxrl_post.rollout.schedule import SampleOptions


def padded_requests(
    prompts: Sequence[Sequence[int]],
    decoding: Sequence[Decoding],
    options: SampleOptions,
    *,
    width: int,
    replicas: int,
    stop_ids: Collection[int],
    seed: int,
    limits: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
) -> Requests:
    """Padded with prompts that ask for no token until every replica has equally many.

    `decoding` of each of the N requests; `limits` and `seeds` too, or all that `options` allow and `seed` for all.
    Raises: ValueError for limits out of range, and for another number of options.
    """
    P, G = len(prompts), options.samples_per_prompt
    rows = -(-P // replicas) * replicas
    tokens, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)], lengths[i] = prompt, len(prompt)
    all_limits, all_seeds = np.zeros(rows * G, np.int32), np.full(rows * G, seed, np.uint32)
    all_limits[: P * G] = options.max_new_tokens if limits is None else limits
    if all_limits.max() > options.max_new_tokens or all_limits.min() < 0:
        raise ValueError(f"limits must lie in 0…max_new_tokens={options.max_new_tokens}")
    if seeds is not None:
        all_seeds[: P * G] = seeds
    if len(decoding) != P * G:
        raise ValueError(f"each has {len(decoding)} options for {P * G} requests")
    decoding = [*decoding, *([Decoding()] * ((rows - P) * G))]
    sampling = sampling_arrays(decoding, stop_ids, strings_of(decoding))
    return Requests(tokens, lengths, np.arange(rows * G, dtype=np.int32), all_seeds, all_limits, sampling)


def strings_of(decoding: Sequence[Decoding]) -> tuple[str, ...]:
    """The stop strings of all, in the order of their automaton."""
    return tuple(sorted({string for options in set(decoding) for string in options.stop}))
