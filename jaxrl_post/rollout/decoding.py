"""How each request is decoded: its options on the host, and the arrays they become.

N requests, V vocabulary, J biased ids, Q bad words of at most L tokens, E stop ids.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np

from jaxrl_post.rollout.sampling import ANY, NOWHERE, Sampling

MOST_LOGPROBS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Options of one request; names and meanings are vLLM's `SamplingParams`. The order in which they act is told in
    `rollout.logits`.

    temperature: 0 is greedy. top_k: 0 keeps all. top_p: 1 keeps all. min_p: tokens below that share of the likeliest
    one's probability are cut.
    min_tokens: stop ids are not drawn, and stop strings not heeded, before so many tokens.
    repetition_penalty: 1 is none, over prompt and output; presence_penalty and frequency_penalty: 0 is none, over the
    output alone.
    logit_bias: (id, number) pairs. bad_words: sequences of ids never completed in the output.
    stop_ids: end this request, beside the sampler's own; ignore_eos: the sampler's own do not.
    stop: strings that end it as soon as its text holds one; the token that completes it is the last.
    top_logprobs: so many of the likeliest ids of each place are recorded with their raw log-probs.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0


def check(options: Decoding, vocab_size: int) -> None:
    """Raises ValueError for a value out of range, by name."""
    finite = math.isfinite
    rules = {
        "temperature": (finite(options.temperature) and options.temperature >= 0, "0 or above"),
        "top_k": (options.top_k >= 0, "0 or above"),
        "top_p": (0 < options.top_p <= 1, "above 0, at most 1"),
        "min_p": (0 <= options.min_p <= 1, "0 to 1"),
        "min_tokens": (options.min_tokens >= 0, "0 or above"),
        "repetition_penalty": (finite(options.repetition_penalty) and options.repetition_penalty > 0, "above 0"),
        "presence_penalty": (finite(options.presence_penalty), "a finite number"),
        "frequency_penalty": (finite(options.frequency_penalty), "a finite number"),
        "logit_bias": (all(finite(value) for _, value in options.logit_bias), "pairs of an id and a finite number"),
        "bad_words": (all(options.bad_words), "sequences of at least one id"),
        "stop": (all(options.stop), "strings of at least one character"),
        "top_logprobs": (0 <= options.top_logprobs <= MOST_LOGPROBS, f"0 to {MOST_LOGPROBS}"),
    }
    for name, (fits, allowed) in rules.items():
        if not fits:
            raise ValueError(f"{name}={getattr(options, name)!r} must be {allowed}")
    ids = {
        "logit_bias": [token for token, _ in options.logit_bias],
        "bad_words": [token for word in options.bad_words for token in word],
        "stop ids": options.stop_ids,
    }
    for name, tokens in ids.items():
        check_ids(name, tokens, vocab_size)


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    if outside := sorted({i for i in ids if not 0 <= i < vocab_size}):
        raise ValueError(f"{name} {outside} are outside the vocabulary of {vocab_size}")


def sampling_arrays(requests: Sequence[Decoding], eos_ids: Collection[int], strings: Sequence[str]) -> Sampling:
    """The options of N requests as arrays. `strings` are the automaton's: bit i of `stop_strings` is the i-th."""
    floats = lambda name: np.array([getattr(r, name) for r in requests], np.float32)
    ints = lambda name: np.array([getattr(r, name) for r in requests], np.int32)
    stops = [sorted({*r.stop_ids, *(() if r.ignore_eos else eos_ids)}) for r in requests]
    return Sampling(
        temperature=floats("temperature"),
        top_k=ints("top_k"),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        min_tokens=ints("min_tokens"),
        repetition=floats("repetition_penalty"),
        presence=floats("presence_penalty"),
        frequency=floats("frequency_penalty"),
        bias_ids=_padded([[token for token, _ in r.logit_bias] for r in requests], NOWHERE, np.int32),
        bias=_padded([[value for _, value in r.logit_bias] for r in requests], 0.0, np.float32),
        bad_words=_words([r.bad_words for r in requests]),
        stop_ids=_padded(stops, NOWHERE, np.int32),
        stop_strings=np.array([sum(1 << strings.index(s) for s in set(r.stop)) for r in requests], np.uint32),
    )


def _padded(rows: Sequence[Sequence[float]], fill: float, dtype: type) -> np.ndarray:
    """[N, longest row]."""
    out: np.ndarray = np.full((len(rows), max(map(len, rows), default=0)), fill, dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def _words(words: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """int32 [N, Q, L], aligned right: `ANY` before a shorter word, and NOWHERE as the last id of no word."""
    longest = max((len(word) for row in words for word in row), default=1)
    out = np.full((len(words), max(map(len, words), default=0), longest), ANY, np.int32)
    out[..., -1] = NOWHERE
    for i, row in enumerate(words):
        for j, word in enumerate(row):
            out[i, j, longest - len(word) :] = word
    return out
