"""Entropy of the token distribution and its bonus.

Legend: B rows, T target tokens of a row, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_post.objectives.reductions import live


def token_entropy(logits_BTV: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """−Σ p·log p in nats of softmax(logits), float32 [B, T], ≥ 0; 0 under the mask, also where all logits are -inf.

    A logit of -inf adds 0 and has gradient 0.
    """
    logp_BTV = jax.nn.log_softmax(live(logits_BTV, mask_BT[:, :, None]), axis=-1)
    finite_BTV = jnp.where(jnp.isfinite(logp_BTV), logp_BTV, 0.0)
    return live(-jnp.sum(jnp.exp(logp_BTV) * finite_BTV, axis=-1), mask_BT)


def entropy_bonus(entropy_BT: jax.Array, mask_BT: jax.Array, *, coef: float) -> jax.Array:
    """−coef·H per token, to be added to the policy term: it shares that term's live set and weights."""
    return -coef * live(entropy_BT, mask_BT)
