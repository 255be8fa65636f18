"""AdamW, its learning-rate schedule, and clipping by the global gradient norm.

The schedule is a function of the loop's step, not of the count of applied updates, so all updates of a step share one
rate and a step without signal does not stretch the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_post import config_optimizer

Tree = Any
UNDECAYED = ("norm", "bias")


class Optimizer(NamedTuple):
    """An update is params − learning_rate(step) · transform(clipped gradients); `step` counts calls of the update."""

    transform: optax.GradientTransformationExtraArgs | optax.GradientTransformation
    learning_rate: Callable[[jax.Array], jax.Array]
    max_grad_norm: float | None


def make_optimizer(options: config_optimizer.Optimizer, steps: int, updates_per_step: int = 1) -> Optimizer:
    """AdamW (arXiv:1711.05101): decay is scaled by the learning rate and spares norm gains and biases.

    `steps` are those of the run; each has `updates_per_step` optimizer updates (epochs × mini-batches).
    """
    adam = optax.scale_by_adam(b1=options.b1, b2=options.b2, eps=options.eps)
    decay = optax.add_decayed_weights(options.weight_decay, mask=decays)
    transform = optax.chain(adam, decay) if options.weight_decay else adam
    rate = schedule(options, steps)
    return Optimizer(transform, lambda update: rate(update // updates_per_step), options.max_grad_norm)


def schedule(options: config_optimizer.Optimizer, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Learning rate, float32, of loop step s = 0, 1, …, with W = warmup_steps, S = steps, f = final_fraction.

    s < W: peak·(s+1)/W, so no step is wasted on a rate of 0. Then, with x = (s−W)/(S−W) clipped to [0, 1]:
    constant: peak; linear: peak·(1 − (1−f)·x); cosine: peak·(f + (1−f)·(1 + cos πx)/2).
    """
    peak, warmup, final = options.learning_rate, options.warmup_steps, options.final_fraction

    def rate(step: jax.Array) -> jax.Array:
        s = jnp.asarray(step, jnp.float32)
        x = jnp.clip((s - warmup) / max(steps - warmup, 1), 0.0, 1.0)
        fall = {"constant": 0.0 * x, "linear": x, "cosine": (1 - jnp.cos(jnp.pi * x)) / 2}[options.schedule]
        return peak * jnp.where(s < warmup, (s + 1) / max(warmup, 1), 1 - (1 - final) * fall)

    return rate


def decays(params: Tree) -> Tree:
    """True for the weights that decay: all but those named as a norm or a bias (each is 1-D in its layer or head)."""

    def by_name(path: tuple[Any, ...], _: Any) -> bool:
        return not jax.tree_util.keystr(path[-1:], simple=True).endswith(UNDECAYED)

    return jax.tree_util.tree_map_with_path(by_name, params)


def clip(grads: Tree, max_norm: float | None) -> tuple[Tree, jax.Array]:
    """Gradients scaled to a global norm of at most `max_norm`, and the norm before, float32.

    Arrays are global, so each parameter counts once whatever its sharding. None does not clip.
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
    if max_norm is None:
        return grads, norm
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), norm
