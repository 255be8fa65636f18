"""Rewards, returns and advantages per token: KL inside the reward, discounting, GAE, whitening.

The live tokens of a sequence stand in time order, without another sequence's tokens between them. Tokens under the
mask (prompt, tool output, padding) are stepped over: the next live token follows directly.

Legend: B rows, T target tokens of a row, S sequences of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_post.objectives.reductions import live, masked_mean, sequence_max, spread


def last_token(mask_BT: jax.Array, sequence_BT: jax.Array | None = None, num_sequences: int = 1) -> jax.Array:
    """bool [B, T], True at the last live token of every sequence."""
    column_BT = jnp.broadcast_to(jnp.arange(mask_BT.shape[1])[None], mask_BT.shape)
    last_BS = sequence_max(column_BT, mask_BT, sequence_BT, num_sequences)
    return mask_BT & (spread(last_BS, mask_BT, sequence_BT) == column_BT)


def token_rewards(
    score_BS: jax.Array, kl_BT: jax.Array, mask_BT: jax.Array, *, kl_coef: float, sequence_BT: jax.Array | None = None
) -> jax.Array:
    """−kl_coef·KL on every live token, plus the sequence's score on its last live token; float32 [B, T]."""
    last_BT = last_token(mask_BT, sequence_BT, score_BS.shape[1])
    return live(spread(score_BS, mask_BT, sequence_BT), last_BT) - kl_coef * live(kl_BT, mask_BT)


def gae(
    reward_BT: jax.Array,
    value_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_BS: jax.Array | None = None,
    sequence_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (arXiv:1506.02438): advantages and returns A + V, float32 [B, T], constants.

    δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γλ·A_{t+1}, over live tokens only: across masked tool tokens V and A
    are carried unchanged and undiscounted (verl). `bootstrap_BS` is V of the state after a sequence's last token: the
    critic's value where the sequence was *truncated*, 0 where it *terminated*; None is 0 everywhere. Advantages are
    not whitened here, so returns stay in reward units.
    """
    bootstrap_BS = jnp.zeros((mask_BT.shape[0], 1)) if bootstrap_BS is None else bootstrap_BS
    last_BT = last_token(mask_BT, sequence_BT, bootstrap_BS.shape[1])
    after_BT = spread(bootstrap_BS, mask_BT, sequence_BT)
    value_BT = live(value_BT, mask_BT)

    def step(carry, token):
        advantage_B, next_value_B = carry
        reward_B, value_B, mask_B, last_B, after_B = token
        next_value = jnp.where(last_B, after_B, next_value_B)
        delta_B = reward_B + gamma * next_value - value_B
        new_B = delta_B + gamma * lam * jnp.where(last_B, 0.0, advantage_B)
        carry = jnp.where(mask_B, new_B, advantage_B), jnp.where(mask_B, value_B, next_value_B)
        return carry, carry[0]

    tokens = (live(reward_BT, mask_BT), value_BT, mask_BT, last_BT, after_BT)
    zero_B = jnp.zeros(mask_BT.shape[0])
    _, advantage_TB = jax.lax.scan(step, (zero_B, zero_B), [x.T for x in tokens], reverse=True)
    advantage_BT = live(advantage_TB.T, mask_BT)
    return jax.lax.stop_gradient((advantage_BT, live(advantage_BT + value_BT, mask_BT)))


def discounted_returns(
    reward_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    gamma: float = 1.0,
    sequence_BT: jax.Array | None = None,
    num_sequences: int = 1,
) -> jax.Array:
    """Return to go Σ_{k≥t} γ^{k−t}·r_k over the live tokens of the same sequence, float32 [B, T]; a constant."""
    bootstrap_BS = jnp.zeros((mask_BT.shape[0], num_sequences))
    zero_BT = jnp.zeros(mask_BT.shape)
    return gae(reward_BT, zero_BT, mask_BT, gamma=gamma, bootstrap_BS=bootstrap_BS, sequence_BT=sequence_BT)[0]


def whiten(x_BT: jax.Array, mask_BT: jax.Array, *, shift_mean: bool = True, ddof: int = 1) -> jax.Array:
    """(x − mean)/√(variance + 1e-8) over the live entries of the whole batch, 0 under the mask; any shape.

    `ddof=1` (verl) divides the squares by n − 1, `ddof=0` by n. `shift_mean=False` adds the mean back. Give it the
    batch of the whole update, before any split. No live entry, or one, gives zeros (plus the mean).
    """
    mean = masked_mean(x_BT, mask_BT)
    centred_BT = live(live(x_BT, mask_BT) - mean, mask_BT)
    count = jnp.sum(mask_BT, dtype=jnp.float32)
    variance = jnp.sum(jnp.square(centred_BT)) / jnp.maximum(count - ddof, 1.0)
    return live(centred_BT * jax.lax.rsqrt(variance + 1e-8) + (0.0 if shift_mean else mean), mask_BT)


def reinforce_plus_plus(
    score_BS: jax.Array,
    kl_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    kl_coef: float,
    gamma: float = 1.0,
    sequence_BT: jax.Array | None = None,
) -> jax.Array:
    """REINFORCE++ (arXiv:2501.03262): token rewards with KL, discounted to go, whitened over the batch (ddof 1)."""
    reward_BT = token_rewards(score_BS, kl_BT, mask_BT, kl_coef=kl_coef, sequence_BT=sequence_BT)
    sequences = score_BS.shape[1]
    returns_BT = discounted_returns(reward_BT, mask_BT, gamma=gamma, sequence_BT=sequence_BT, num_sequences=sequences)
    return whiten(returns_BT, mask_BT)
