"""Advantages from the rewards of a group of samples of the same prompt.

A group is known by its id, never by position, so the order of samples and the layout of batches cannot mix groups.
A reward that is not finite is *missing*: it is left out of every statistic and its sample gets advantage 0.

Legend: N samples, `group_N` int ids, `rewards_N` float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

EPSILON = 1e-6


def _group_sum(x_N: jax.Array, group_N: jax.Array) -> jax.Array:
    same_NN = group_N[:, None] == group_N[None, :]
    return jnp.sum(jnp.where(same_NN, x_N[None, :], 0.0), axis=1)


def _group_max(x_N: jax.Array, group_N: jax.Array) -> jax.Array:
    same_NN = group_N[:, None] == group_N[None, :]
    return jnp.max(jnp.where(same_NN, x_N[None, :], -jnp.inf), axis=1)


@jax.jit
def group_statistics(rewards_N: jax.Array, group_N: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each sample's group: centred reward R − mean, unbiased (ddof 1) standard deviation, and size; float32 [N].

    Missing rewards have centred reward 0 and do not count in the size. The std of a group of one is 0. Rewards are
    taken relative to the group's best before averaging, so equal rewards centre to exactly 0.
    """
    rewards_N = jnp.asarray(rewards_N, jnp.float32)
    present_N = jnp.isfinite(rewards_N)
    size_N = _group_sum(present_N.astype(jnp.float32), group_N)
    best_N = _group_max(jnp.where(present_N, rewards_N, -jnp.inf), group_N)
    below_N = jnp.where(present_N, rewards_N - best_N, 0.0)
    mean_N = _group_sum(below_N, group_N) / jnp.maximum(size_N, 1.0)
    centred_N = jnp.where(present_N, below_N - mean_N, 0.0)
    std_N = jnp.sqrt(_group_sum(jnp.square(centred_N), group_N) / jnp.maximum(size_N - 1.0, 1.0))
    return centred_N, std_N, size_N


def group_advantages(rewards_N: jax.Array, group_N: jax.Array, normalize_by_std: bool = True) -> jax.Array:
    """GRPO (arXiv:2402.03300): (R − mean) / (std + 1e-6) inside each group; float32 [N], std with ddof 1.

    `normalize_by_std=False` is Dr.GRPO's R − mean (arXiv:2503.20783). A group of equal rewards, or of one sample,
    gets exactly 0: there is nothing to compare with. (verl gives a group of one its raw reward instead.)
    """
    centred_N, std_N, _ = group_statistics(rewards_N, group_N)
    return centred_N / (std_N + EPSILON) if normalize_by_std else centred_N
