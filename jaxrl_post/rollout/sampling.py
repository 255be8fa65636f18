"""The distribution a token is drawn from, and the draw.

S sequences, V vocabulary, J, Q, L, E as in `rollout.decoding`. The order is that of vLLM: what `rollout.logits` does to
the logits, then temperature, then min-p, then top-k, then top-p of what those left. Ties at a threshold are kept.
Everything is float32.

The draw is an inverse CDF in two levels: first a block of the vocabulary, then a token inside it. It costs one pass
over the logits; Gumbel noise would cost V random numbers a row.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NOWHERE = 2**31 - 1  # in the place of an id that is not there: outside of every vocabulary
ANY = -2  # in the places before a bad word: whatever is there will do


class Sampling(NamedTuple):
    """Options of each request, [S]: temperature float32 (0 greedy), top_k int32 (0 all), top_p and min_p float32;
    min_tokens int32; repetition (1 none), presence, frequency float32; bias_ids int32 and bias float32 [S, J];
    bad_words int32 [S, Q, L]; stop_ids int32 [S, E]; stop_strings uint32, a bit for each string of the automaton.
    None: unused.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any = None
    min_tokens: Any = None
    repetition: Any = None
    presence: Any = None
    frequency: Any = None
    bias_ids: Any = None
    bias: Any = None
    bad_words: Any = None
    stop_ids: Any = None
    stop_strings: Any = None


@dataclasses.dataclass(frozen=True)
class Features:
    """Which operations a batch of requests needs; static, so that the others are not compiled in."""

    greedy: bool
    tempered: bool
    top_k: bool
    top_p: bool
    min_p: bool
    min_tokens: bool
    repetition: bool
    counted: bool
    bias: bool
    bad_words: bool
    stop_strings: bool

    @classmethod
    def of(cls, options: Sampling) -> Features:
        temperature = np.asarray(options.temperature)
        other_than = lambda neutral, x: x is not None and bool((np.asarray(x) != neutral).any())
        return cls(
            greedy=bool((temperature == 0).any()),
            tempered=bool(((temperature != 1) & (temperature != 0)).any()),
            top_k=other_than(0, options.top_k),
            top_p=other_than(1, options.top_p),
            min_p=other_than(0, options.min_p),
            min_tokens=other_than(0, options.min_tokens),
            repetition=other_than(1, options.repetition),
            counted=other_than(0, options.presence) or other_than(0, options.frequency),
            bias=other_than(NOWHERE, options.bias_ids),
            bad_words=options.bad_words is not None and options.bad_words.shape[1] > 0,
            stop_strings=other_than(0, options.stop_strings),
        )

    @property
    def counts_output(self) -> bool:
        """Whether tokens sampled before are counted."""
        return self.repetition or self.counted

    @property
    def shapes_logits(self) -> bool:
        """Whether `rollout.logits` has anything to do."""
        return self.min_tokens or self.repetition or self.counted or self.bias or self.bad_words


class Draw(NamedTuple):
    """[S]: token int32; logp under the distribution drawn from (0 when greedy); raw_logp under softmax(logits)."""

    token: jax.Array
    logp: jax.Array
    raw_logp: jax.Array


def draw(
    logits_SV: jax.Array,
    options: Sampling,
    uniform_S2: jax.Array,
    features: Features,
    shaped_SV: jax.Array | None = None,
) -> Draw:
    """Draw one token a row with two uniforms in [0, 1) a row; from `shaped` logits, where penalties made others."""
    raw_peak_S = logits_SV.max(axis=-1)
    raw_total_S = jnp.exp(logits_SV - raw_peak_S[:, None]).sum(axis=-1)
    hot_S = options.temperature > 0
    shaped_SV, peak_S = (logits_SV, raw_peak_S) if shaped_SV is None else (shaped_SV, shaped_SV.max(axis=-1))
    scores_SV = shaped_SV
    if features.tempered or features.greedy:
        temperature_S = jnp.where(hot_S, options.temperature, 1.0)
        scores_SV, peak_S = shaped_SV / temperature_S[:, None], peak_S / temperature_S
    mass_SV = jnp.exp(scores_SV - peak_S[:, None])
    if features.min_p or features.top_k or features.top_p:
        # Not exp of what is cut: a CPU takes several times as long for exp(-inf).
        mass_SV = jnp.where(_cut(scores_SV, peak_S, options, features) > -jnp.inf, mass_SV, 0.0)
    token_S, total_S = inverse_cdf(mass_SV, uniform_S2)
    if features.greedy:
        token_S = jnp.where(hot_S, token_S, jnp.argmax(shaped_SV, axis=-1).astype(jnp.int32))
    pick = lambda x_SV: jnp.take_along_axis(x_SV, token_S[:, None], axis=1)[:, 0]
    logp_S = jnp.where(hot_S, pick(scores_SV) - peak_S - jnp.log(total_S), 0.0)
    return Draw(token_S, logp_S, pick(logits_SV) - raw_peak_S - jnp.log(raw_total_S))


def inverse_cdf(mass_SV: jax.Array, uniform_S2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Token with probability mass / total, int32 [S], and the total, float32 [S]. A token without mass never comes.

    The first uniform chooses a block of the vocabulary, the second a token in it, so that tokens rarer than the
    resolution of one float32 uniform can still be drawn. Blocks depend on V alone, so every mesh draws alike, and as
    their number is a power of two, a vocabulary cut over devices is cut between blocks.
    """
    S, V = mass_SV.shape
    mass_SKB = mass_SV.reshape(S, blocks(V), -1)
    mass_SK = mass_SKB.sum(axis=-1)
    # A running sum by a product with a triangle: over devices it becomes one all-reduce of K numbers a row.
    running_SK = jnp.matmul(mass_SK, jnp.triu(jnp.ones((blocks(V),) * 2)), precision=lax.Precision.HIGHEST)
    block_S = _first_above(running_SK, uniform_S2[:, 0])
    inside_SB = jnp.take_along_axis(mass_SKB, block_S[:, None, None], axis=1)[:, 0]
    offset_S = _first_above(jnp.cumsum(inside_SB, axis=-1), uniform_S2[:, 1])
    return block_S * (V // blocks(V)) + offset_S, running_SK[:, -1]


def blocks(V: int) -> int:
    """The largest power of two that divides V, up to √V or 64: the triangle costs blocks² products a row."""
    return min(V & -V, max(64, 1 << (V.bit_length() // 2)))


def _first_above(running_SX: jax.Array, uniform_S: jax.Array) -> jax.Array:
    """First index whose running sum exceeds uniform · total, int32 [S]; its own mass is above 0 by construction."""
    index_S = (running_SX <= uniform_S[:, None] * running_SX[:, -1:]).sum(axis=-1)
    return jnp.minimum(index_S, running_SX.shape[1] - 1).astype(jnp.int32)


def likeliest(logits_SV: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The n likeliest tokens, int32 [S, n], and their log-probs under softmax(logits), float32 [S, n].

    Looked for in the n blocks whose own likeliest are the best: a third of the cost of one pass over all.
    """
    S, V = logits_SV.shape
    logits_SKB = logits_SV.reshape(S, blocks(V), -1)
    _, block_SX = lax.top_k(logits_SKB.max(axis=-1), min(n, blocks(V)))
    inside_SXB = jnp.take_along_axis(logits_SKB, block_SX[:, :, None], axis=1)
    value_Sn, at_Sn = lax.top_k(inside_SXB.reshape(S, -1), n)
    width = V // blocks(V)
    token_Sn = jnp.take_along_axis(block_SX, at_Sn // width, axis=1) * width + at_Sn % width
    return token_Sn.astype(jnp.int32), value_Sn - jax.nn.logsumexp(logits_SV, axis=-1, keepdims=True)


def _cut(scores_SV: jax.Array, peak_S: jax.Array, options: Sampling, features: Features) -> jax.Array:
    """Scores that no token is drawn from become -inf."""
    if features.min_p:
        scores_SV = keep_min_p(scores_SV, peak_S, options.min_p)
    if features.top_k:
        scores_SV = keep_top_k(scores_SV, options.top_k)
    return keep_top_p(scores_SV, options.top_p) if features.top_p else scores_SV


def keep_min_p(scores_SV: jax.Array, peak_S: jax.Array, min_p_S: jax.Array) -> jax.Array:
    """Scores of tokens below min_p times the probability of the likeliest become -inf (arXiv:2407.01082)."""
    return jnp.where(scores_SV >= (peak_S + jnp.log(min_p_S))[:, None], scores_SV, -jnp.inf)


def keep_top_k(scores_SV: jax.Array, k_S: jax.Array) -> jax.Array:
    """Scores below the k-th largest become -inf; k = 0 keeps the row as it is."""
    need_S = jnp.where(k_S > 0, k_S, scores_SV.shape[1]).astype(jnp.float32)
    return _at_least(scores_SV, jnp.ones_like(scores_SV), need_S)


def keep_top_p(scores_SV: jax.Array, p_S: jax.Array) -> jax.Array:
    """Keep the most likely tokens until their probability reaches p; p = 1 keeps the row as it is."""
    mass_SV = jax.nn.softmax(scores_SV, axis=-1)
    return _at_least(scores_SV, mass_SV, jnp.where(p_S < 1, p_S, jnp.inf))


def _at_least(scores_SV: jax.Array, weight_SV: jax.Array, need_S: jax.Array) -> jax.Array:
    """Keep scores ≥ t for the largest t at which the kept weight still reaches `need`; if none does, keep all.

    Builds t bit by bit on order-preserving integers: 32 passes, exact, no sort.
    """
    bits_SV = lax.bitcast_convert_type(scores_SV, jnp.uint32)
    order_SV = jnp.where(bits_SV >> 31 == 1, ~bits_SV, bits_SV | jnp.uint32(1 << 31))

    def try_bit(i: jax.Array, threshold_S: jax.Array) -> jax.Array:
        higher_S = threshold_S | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        kept_S = jnp.where(order_SV >= higher_S[:, None], weight_SV, 0.0).sum(axis=-1)
        return jnp.where(kept_S >= need_S, higher_S, threshold_S)

    threshold_S = lax.fori_loop(0, 32, try_bit, jnp.zeros(scores_SV.shape[:1], jnp.uint32))
    return jnp.where(order_SV >= threshold_S[:, None], scores_SV, -jnp.inf)


def uniforms(seed_S: jax.Array, step: jax.Array, request_S: jax.Array, position_S: jax.Array) -> jax.Array:
    """Two uniforms a row, keyed by (seed, policy step, request id, position) and nothing else, float32 [S, 2].

    So a request's draws are the same in any slot, after any refill and on any mesh. `step` may differ by row.
    """

    def one(seed: jax.Array, step: jax.Array, request: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        for part in (step, request, position):
            key = jax.random.fold_in(key, part)
        return jax.random.uniform(key, (2,))

    return jax.vmap(one)(seed_S, jnp.broadcast_to(step, seed_S.shape), request_S, position_S)
