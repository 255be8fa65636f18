"""What the host hands to a call that decodes: where each slot is, its request's options, and what penalties look at.

S slots, W columns of a slot, X tokens before the last of a bad word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from jaxrl_post.rollout.decoding import Decoding, sampling_arrays
from jaxrl_post.rollout.logits import NO_TOKEN
from jaxrl_post.rollout.sampling import NOWHERE, Features, Sampling
from jaxrl_post.rollout.step_programs import Inputs, Past
from jaxrl_post.rollout.step_records import Request, Slot


def options_of(decoding: Sequence[Decoding], stop_ids: Collection[int]) -> tuple[Sampling, Features]:
    """The slots' options as arrays, and what they ask of the program. Stop strings are looked for on the host."""
    arrays = _widened(sampling_arrays([dataclasses.replace(d, stop=()) for d in decoding], stop_ids, ()))
    return arrays, dataclasses.replace(Features.of(arrays), greedy=True, tempered=True)


def inputs_of(slots: Sequence[Slot], columns: int, options: Sampling, features: Features) -> Inputs:
    """Of a call that decodes, for slots of so many columns."""
    nothing = Request(limit=0)
    requests = [slot.request or nothing for slot in slots]
    ints = lambda values: np.array(list(values), np.int32)
    looks_back = features.repetition or features.counted or features.bad_words
    return Inputs(
        token=ints(slot.pending[0] if slot.running else 0 for slot in slots),
        length=ints(slot.length for slot in slots),
        sampled=ints(len(slot.sampled) for slot in slots),
        limit=ints(r.limit for r in requests),
        running=np.array([slot.running for slot in slots]),
        id=ints(r.id for r in requests),
        seed=np.array([r.seed for r in requests], np.uint32),
        step=ints(r.step for r in requests),
        options=options,
        past=_past(slots, columns, options) if looks_back else None,
    )


def _past(slots: Sequence[Slot], columns: int, options: Sampling) -> Past:
    S, W, X = len(slots), columns, options.bad_words.shape[-1] - 1
    full = lambda fill, *size: np.full((S, *size), fill, np.int32)
    past = Past(prompt=full(0, W), length=full(0), output=full(NOWHERE, W), recent=full(NO_TOKEN, X))
    for i, slot in enumerate(slots):
        past.prompt[i, : len(slot.prompt)], past.length[i] = slot.prompt, len(slot.prompt)
        past.output[i, : len(slot.sampled)] = slot.sampled
        last = slot.sampled[len(slot.sampled) - min(X, len(slot.sampled)) :]
        past.recent[i, X - len(last) :] = last
    return past


def _widened(options: Sampling) -> Sampling:
    """Lists padded to a power of two, so that other lengths seldom mean another compile."""

    def wide(x: np.ndarray, fill: float) -> np.ndarray:
        size = x.shape[1]
        more = (1 << (size - 1).bit_length()) - size if size else 0
        return np.pad(x, [(0, 0), (0, more)], constant_values=fill)

    return options._replace(
        bias_ids=wide(options.bias_ids, NOWHERE), bias=wide(options.bias, 0), stop_ids=wide(options.stop_ids, NOWHERE)
    )
