"""Advantages from the rewards of a group of samples of the same prompt.

A group is known by its id, never by position, so the order of samples and the layout of batches cannot mix groups.
A reward that is not finite is *missing*: it is left out of every statistic and its sample gets advantage 0. Unless a
function says otherwise a group of one, and a group of equal rewards, gets exactly 0.

Legend: N samples, K reward heads. `rewards_N` float32, `group_N` int ids, `lengths_N` live tokens; all results [N].
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.objectives.reductions import live, masked_mean

EPSILON = 1e-6


class GroupStatistics(NamedTuple):
    """float32 [N], each sample's own group: R − mean, the mean, the unbiased (ddof 1) std, present samples."""

    centred: jax.Array
    mean: jax.Array
    std: jax.Array
    size: jax.Array


def _group_sum(x_N: jax.Array, group_N: jax.Array) -> jax.Array:
    same_NN = group_N[:, None] == group_N[None, :]
    return jnp.sum(jnp.where(same_NN, x_N[None, :], 0.0), axis=1)


def _group_max(x_N: jax.Array, group_N: jax.Array, others_only: bool = False) -> jax.Array:
    same_NN = group_N[:, None] == group_N[None, :]
    if others_only:
        same_NN &= ~jnp.eye(len(group_N), dtype=bool)
    return jnp.max(jnp.where(same_NN, x_N[None, :], -jnp.inf), axis=1)


@jax.jit
def group_statistics(rewards_N: jax.Array, group_N: jax.Array, weight_N: jax.Array | None = None) -> GroupStatistics:
    """Statistics of every sample's group; `weight_N` weighs the mean (not the size), None weighs all alike.

    Missing rewards have centred reward 0 and do not count. The std of a group of one is 0. Rewards are taken relative
    to the group's best before averaging, so equal rewards centre to exactly 0.
    """
    present_N = jnp.isfinite(rewards_N)
    weight_N = live(jnp.ones_like(present_N) if weight_N is None else weight_N, present_N)
    size_N = _group_sum(present_N.astype(jnp.float32), group_N)
    total_N = _group_sum(weight_N, group_N)
    best_N = _group_max(live(rewards_N, present_N, -jnp.inf), group_N)
    best_N = jnp.where(jnp.isfinite(best_N), best_N, 0.0)
    below_N = live(rewards_N - best_N, present_N)
    below_mean_N = _group_sum(below_N * weight_N, group_N) / jnp.where(total_N > 0, total_N, 1.0)
    centred_N = live(below_N - below_mean_N, present_N)
    std_N = jnp.sqrt(_group_sum(jnp.square(centred_N), group_N) / jnp.maximum(size_N - 1.0, 1.0))
    return GroupStatistics(centred_N, best_N + below_mean_N, std_N, size_N)


def _std(x: jax.Array, present: jax.Array) -> jax.Array:
    """Unbiased std of the present values, 0 for fewer than two."""
    square_sum = jnp.sum(jnp.square(live(x - masked_mean(x, present), present)))
    return jnp.sqrt(square_sum / jnp.maximum(jnp.sum(present, dtype=jnp.float32) - 1.0, 1.0))


def group_advantages(rewards_N: jax.Array, group_N: jax.Array, normalize_by_std: bool = True) -> jax.Array:
    """GRPO (arXiv:2402.03300): (R − mean) / (std + 1e-6) inside each group, std with ddof 1.

    `normalize_by_std=False` is Dr.GRPO's R − mean (arXiv:2503.20783), to be used with seq-mean-token-sum-norm.
    verl gives a group of one its raw reward; here it gets 0, as there is nothing to compare with.
    """
    group = group_statistics(jnp.asarray(rewards_N, jnp.float32), jnp.asarray(group_N))
    return group.centred / (group.std + EPSILON) if normalize_by_std else group.centred


def leave_one_out(rewards_N: jax.Array, group_N: jax.Array) -> jax.Array:
    """RLOO (arXiv:2402.14740): R_i − mean of the others = n/(n−1)·(R_i − mean)."""
    group = group_statistics(jnp.asarray(rewards_N, jnp.float32), jnp.asarray(group_N))
    return group.centred * group.size / jnp.maximum(group.size - 1.0, 1.0)


def batch_scaled(rewards_N: jax.Array, group_N: jax.Array) -> jax.Array:
    """LitePPO (arXiv:2508.08221): (R − mean of the group) / (std of all rewards of the batch + 1e-6), ddof 1."""
    rewards_N = jnp.asarray(rewards_N, jnp.float32)
    centred_N = group_advantages(rewards_N, group_N, normalize_by_std=False)
    return centred_N / (_std(rewards_N, jnp.isfinite(rewards_N)) + EPSILON)


def reinforce_plus_plus_baseline(rewards_N: jax.Array, group_N: jax.Array, lengths_N: jax.Array) -> jax.Array:
    """REINFORCE++-baseline (arXiv:2501.03262): R − mean of the group, then whitened over the batch's *tokens*.

    A sample counts once for each of its `lengths_N` tokens, as in verl, where the value is spread over the tokens
    before whitening: mean 0 and unbiased variance 1 over tokens (1e-8 inside the root).
    """
    centred_N = group_advantages(rewards_N, group_N, normalize_by_std=False)
    tokens_N = live(lengths_N, jnp.isfinite(rewards_N))
    count = jnp.sum(tokens_N)
    shifted_N = centred_N - jnp.sum(centred_N * tokens_N) / jnp.maximum(count, 1.0)
    variance = jnp.sum(jnp.square(shifted_N) * tokens_N) / jnp.maximum(count - 1.0, 1.0)
    return live(shifted_N * jax.lax.rsqrt(variance + 1e-8), jnp.isfinite(rewards_N))


def remax(rewards_N: jax.Array, greedy_rewards_N: jax.Array) -> jax.Array:
    """ReMax (arXiv:2310.10505): R of the sample − R of the greedy response to the same prompt."""
    present_N = jnp.isfinite(rewards_N) & jnp.isfinite(greedy_rewards_N)
    return live(rewards_N, present_N) - live(greedy_rewards_N, present_N)


def length_weighted(rewards_N: jax.Array, group_N: jax.Array, lengths_N: jax.Array) -> jax.Array:
    """OPO (arXiv:2505.23585): R − Σ length·R / Σ length over the group, its variance-optimal baseline."""
    return group_statistics(jnp.asarray(rewards_N, jnp.float32), jnp.asarray(group_N), lengths_N).centred


def pass_at_k(rewards_N: jax.Array, group_N: jax.Array) -> jax.Array:
    """Pass@k training (arXiv:2503.19595): the group's best sample gets best − second best, the others 0."""
    rewards_N = live(rewards_N, jnp.isfinite(rewards_N), -jnp.inf)
    other_N = _group_max(rewards_N, jnp.asarray(group_N), others_only=True)
    return jnp.where(jnp.isfinite(other_N), jnp.maximum(rewards_N - other_N, 0.0), 0.0)


def maxrl(rewards_N: jax.Array, group_N: jax.Array) -> jax.Array:
    """MaxRL (arXiv:2602.02710): (R − mean) / mean of the group, for rewards ≥ 0; 0 where the mean is 0."""
    group = group_statistics(jnp.asarray(rewards_N, jnp.float32), jnp.asarray(group_N))
    positive_N = group.mean > 0
    return jnp.where(positive_N, group.centred / jnp.where(positive_N, group.mean, 1.0), 0.0)


def gpg(rewards_N: jax.Array, group_N: jax.Array, scale: float = 1.0) -> jax.Array:
    """GPG (arXiv:2504.02546): α·(R − mean)/scale, α = samples / samples whose group is not all equal."""
    group = group_statistics(jnp.asarray(rewards_N, jnp.float32), jnp.asarray(group_N))
    present, useful = jnp.sum(jnp.isfinite(rewards_N)), jnp.sum(jnp.isfinite(rewards_N) & (group.std > 0))
    return group.centred * present / (jnp.maximum(useful, 1) * scale)


def gdpo(rewards_NK: jax.Array, group_N: jax.Array, head_weights_K: jax.Array) -> jax.Array:
    """GDPO (arXiv:2601.05242): GRPO's normalisation of every reward head alone, weighted sum, whitened over samples.

    The sums average 0 over the batch as they are, so whitening is division by their std (ddof 1) + 1e-6; over samples,
    as in TRL, where verl counts tokens. A head missing for a sample adds 0 to its sum; one without any head gets 0.
    """
    heads_NK = jax.vmap(group_advantages, in_axes=(1, None), out_axes=1)(jnp.asarray(rewards_NK), group_N)
    total_N = jnp.sum(heads_NK * jnp.asarray(head_weights_K, jnp.float32)[None, :], axis=1)
    present_N = jnp.any(jnp.isfinite(rewards_NK), axis=1)
    return live(total_N / (_std(total_N, present_N) + EPSILON), present_N)
