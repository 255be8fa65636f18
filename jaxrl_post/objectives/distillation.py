"""Divergences between a teacher's and the student's next-token distributions, per token.

Each divergence takes log-probabilities whose last axis is the whole vocabulary, or a teacher's top k. For top k gather
the student's with `at`; the sum over k alone (verl's `forward_kl_topk`) is not a divergence and may be negative, while
`with_tail` adds the rest of the vocabulary as one bucket and makes it a lower bound of the full one. The teacher is a
constant; the gradient flows into the student, under the student's own log-probs as given.

Legend: B rows, T target tokens of a row, V vocabulary, K teacher's top tokens, C = V, K or K + 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_post.objectives.reductions import live
from jaxrl_post.objectives.surrogates import constant, log_ratio

LOG_ZERO = -1e30


def at(logits_BTV: jax.Array, ids_BTK: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Log-probabilities float32 [B, T, K] of the token ids under softmax(logits); 0 under the mask."""
    logits_BTV = live(logits_BTV, mask_BT[:, :, None])
    ids_BTK = jnp.where(mask_BT[:, :, None], ids_BTK, 0)
    chosen_BTK = jnp.take_along_axis(logits_BTV, ids_BTK, axis=-1)
    return live(chosen_BTK - jax.nn.logsumexp(logits_BTV, axis=-1, keepdims=True), mask_BT[:, :, None])


def with_tail(logp_BTK: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """`logp` with log(1 − Σ p) appended, float32 [B, T, K + 1]: the mass of all other tokens, at least 1e-7."""
    logp_BTK = live(logp_BTK, mask_BT[:, :, None])
    mass_BT1 = live(jnp.sum(jnp.exp(logp_BTK), axis=-1, keepdims=True), mask_BT[:, :, None])
    return jnp.concatenate([logp_BTK, jnp.log(jnp.maximum(1.0 - mass_BT1, 1e-7))], axis=-1)


def _expected_log_ratio(p_logp_BTC: jax.Array, q_logp_BTC: jax.Array) -> jax.Array:
    """Σ p·(log p − log q); an entry with p = 0 adds 0 and passes no gradient."""
    alive_BTC = jnp.isfinite(p_logp_BTC)
    p_logp_BTC, q_logp_BTC = jnp.where(alive_BTC, p_logp_BTC, 0.0), jnp.where(alive_BTC, q_logp_BTC, 0.0)
    return jnp.sum(jnp.where(alive_BTC, jnp.exp(p_logp_BTC) * (p_logp_BTC - q_logp_BTC), 0.0), axis=-1)


def _clean(teacher_BTC: jax.Array, student_BTC: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    mask_BT1 = mask_BT[:, :, None]
    return constant(teacher_BTC, mask_BT1), live(student_BTC, mask_BT1)


def forward_kl(teacher_BTC: jax.Array, student_BTC: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """KL(teacher ‖ student), float32 [B, T]: covers the teacher's modes."""
    teacher_BTC, student_BTC = _clean(teacher_BTC, student_BTC, mask_BT)
    return live(_expected_log_ratio(teacher_BTC, student_BTC), mask_BT)


def reverse_kl(teacher_BTC: jax.Array, student_BTC: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """KL(student ‖ teacher), float32 [B, T]: seeks one of the teacher's modes (MiniLLM, arXiv:2306.08543)."""
    teacher_BTC, student_BTC = _clean(teacher_BTC, student_BTC, mask_BT)
    return live(_expected_log_ratio(student_BTC, teacher_BTC), mask_BT)


def js_divergence(
    teacher_BTC: jax.Array, student_BTC: jax.Array, mask_BT: jax.Array, *, beta: float = 0.5
) -> jax.Array:
    """Generalised Jensen–Shannon of GKD (arXiv:2306.13649), float32 [B, T].

    beta·KL(teacher ‖ m) + (1 − beta)·KL(student ‖ m), m = beta·teacher + (1 − beta)·student. Raises ValueError unless
    0 < beta < 1: at the ends it vanishes (divided by beta or 1 − beta it tends to forward_kl and reverse_kl).
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta} must lie in (0, 1); use forward_kl or reverse_kl for the ends")
    teacher_BTC, student_BTC = _clean(teacher_BTC, student_BTC, mask_BT)
    # A token neither side can emit has log 0 on both; -inf would make the mixture's gradient NaN.
    teacher_BTC, student_BTC = jnp.maximum(teacher_BTC, LOG_ZERO), jnp.maximum(student_BTC, LOG_ZERO)
    mixture_BTC = jnp.logaddexp(teacher_BTC + jnp.log(beta), student_BTC + jnp.log1p(-beta))
    to_teacher_BT = _expected_log_ratio(teacher_BTC, mixture_BTC)
    return live(beta * to_teacher_BT + (1 - beta) * _expected_log_ratio(student_BTC, mixture_BTC), mask_BT)


def teacher_advantage(
    advantage_BT: jax.Array, logp_BT: jax.Array, teacher_logp_BT: jax.Array, mask_BT: jax.Array, *, coef: float
) -> jax.Array:
    """A − coef·(log π_θ − log π_teacher) of the sampled token, float32 [B, T], a constant (slime `--use-opd`).

    With A = 0 a policy gradient on it descends the reverse KL to the teacher. The log-ratio is clamped to ±20.
    """
    gap_BT = log_ratio(logp_BT, teacher_logp_BT, mask_BT)
    return constant(live(advantage_BT, mask_BT) - coef * gap_BT, mask_BT)
