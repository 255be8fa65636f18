"""What penalties, biases and bans make of the logits, and what they remember of a sequence.

The order is that of vLLM: bad words, minimum of tokens, logit bias, repetition penalty, frequency and presence
penalties; temperature and the cuts come after (`rollout.sampling`). Each is compiled in only where a request asks for
it, and what it remembers is kept in the slots: of penalties the counts of tokens, [S, V].

S slots, V vocabulary, Q bad words of L tokens, W prompt columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.rollout.sampling import ANY, NOWHERE, Features, Sampling
from jaxrl_post.rollout.stop_strings import Automaton, read

NO_TOKEN = -1


class History(NamedTuple):
    """What is remembered of the running sequences, None where no request needs it.

    output: how often each token was sampled, int16 or int32 [S, V]. prompt: whether it is in the prompt, bool [S, V].
    recent: the last L-1 tokens sampled, int32 [S, L-1]. text: state of the stop strings' automaton, int32 [S].
    """

    output: Any
    prompt: Any
    recent: Any
    text: Any


def no_history(
    tokens_SW: jax.Array, lengths_S: jax.Array, options: Sampling, features: Features, vocab: int, most: int
) -> History:
    """Of sequences that have sampled nothing yet after these prompts, and will sample at most `most`."""
    S = len(tokens_SW)
    output_SV = jnp.zeros((S, vocab), _count_dtype(most)) if features.counts_output else None
    recent = jnp.full((S, options.bad_words.shape[-1] - 1), NO_TOKEN) if features.bad_words else None
    return History(
        output=output_SV,
        prompt=_in_prompt(tokens_SW, lengths_S, vocab) if features.repetition else None,
        recent=recent,
        text=jnp.zeros(S, jnp.int32) if features.stop_strings else None,
    )


def history_bytes(features: Features, vocab: int, most: int) -> int:
    """Bytes of the arrays over the vocabulary that a slot remembers."""
    return vocab * (features.counts_output * jnp.dtype(_count_dtype(most)).itemsize + features.repetition)


def _count_dtype(most: int) -> type:
    return jnp.int16 if most < 2**15 else jnp.int32


def _in_prompt(tokens_SW: jax.Array, lengths_S: jax.Array, vocab: int) -> jax.Array:
    S, W = tokens_SW.shape
    token_SW = jnp.where(jnp.arange(W)[None] < lengths_S[:, None], tokens_SW, NOWHERE)
    return jnp.zeros((S, vocab), bool).at[jnp.arange(S)[:, None], token_SW].set(True, mode="drop")


def extend(history: History, token_S: jax.Array, automaton: Automaton | None) -> tuple[History, jax.Array]:
    """One more token for each sequence, and the stop strings it completes, uint32 [S]."""
    output, recent, text = history.output, history.recent, history.text
    completed_S = jnp.zeros(len(token_S), jnp.uint32)
    if output is not None:
        output = output.at[jnp.arange(len(token_S)), token_S].add(1)
    if recent is not None and recent.shape[1]:
        recent = jnp.concatenate([recent[:, 1:], token_S[:, None]], axis=1)
    if text is not None and automaton is not None:
        text, completed_S = read(automaton, text, token_S)
    return History(output, history.prompt, recent, text), completed_S


def stopped(options: Sampling, token_S: jax.Array, completed_S: jax.Array, count_S: jax.Array) -> jax.Array:
    """Whether token number `count` ends its sequence: a stop id, or a stop string after the least number of tokens."""
    stopped_S = (token_S[:, None] == options.stop_ids).any(axis=-1)
    return stopped_S | ((completed_S & options.stop_strings) != 0) & (count_S >= options.min_tokens)


def shaped(
    logits_SV: jax.Array, options: Sampling, history: History, count_S: jax.Array, features: Features
) -> jax.Array:
    """The logits to draw token number `count` from."""
    if features.bad_words:
        logits_SV = _banned(logits_SV, _last_of_bad_words(options.bad_words, history.recent))
    if features.min_tokens:
        early_S1 = (count_S < options.min_tokens)[:, None]
        logits_SV = _banned(logits_SV, jnp.where(early_S1, options.stop_ids, NOWHERE))
    if features.bias:
        logits_SV = logits_SV.at[_rows(logits_SV), options.bias_ids].add(options.bias, mode="drop")
    if features.repetition:
        logits_SV = _less_repetition(logits_SV, options.repetition, (history.output > 0) | history.prompt)
    if features.counted:
        output_SV = history.output.astype(jnp.float32)
        logits_SV -= options.frequency[:, None] * output_SV + options.presence[:, None] * (output_SV > 0)
    return logits_SV


def _less_repetition(logits_SV: jax.Array, penalty_S: jax.Array, seen_SV: jax.Array) -> jax.Array:
    """Logits of tokens seen, prompt included, go down: divided where positive, else multiplied (CTRL,
    arXiv:1909.05858, as in transformers and vLLM)."""
    penalty_S1 = penalty_S[:, None]
    return jnp.where(seen_SV, jnp.where(logits_SV > 0, logits_SV / penalty_S1, logits_SV * penalty_S1), logits_SV)


def _last_of_bad_words(words_SQL: jax.Array, recent_SX: jax.Array) -> jax.Array:
    """The ids that would complete a bad word now, int32 [S, Q]."""
    before_SQX = words_SQL[..., :-1]
    begun_SQ = ((before_SQX == recent_SX[:, None]) | (before_SQX == ANY)).all(axis=-1)
    return jnp.where(begun_SQ, words_SQL[..., -1], NOWHERE)


def _banned(logits_SV: jax.Array, ids_SX: jax.Array) -> jax.Array:
    return logits_SV.at[_rows(logits_SV), ids_SX].set(-jnp.inf, mode="drop")


def _rows(logits_SV: jax.Array) -> jax.Array:
    return jnp.arange(len(logits_SV))[:, None]
