"""The seconds that a model's products with its weights take by themselves: what no decode or update can be faster than.

Each product of a layer is timed alone, in the process that asks, on the shapes it has there; attention, norms, the draw
and the optimizer come on top.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from jaxrl_post.models.config import ModelConfig

Shape = tuple[int, int]


def layer_products(c: ModelConfig) -> list[Shape]:
    """(inner, columns) of a layer's weights, those that read the same input joined."""
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return [
        (c.hidden_size, queries + 2 * keys), (queries, c.hidden_size), (c.hidden_size, 2 * c.intermediate_size),
        (c.intermediate_size, c.hidden_size),
    ]  # fmt: skip


def forward_s(c: ModelConfig, rows: int, scored: int) -> float:
    """Seconds of `rows` positions through the layers and `scored` of them through the head."""
    head = product_s(scored, c.hidden_size, c.vocab_size) if scored else 0.0
    return c.layers * sum(product_s(rows, *shape) for shape in layer_products(c)) + head


def update_s(c: ModelConfig, rows: int, scored: int) -> float:
    """Seconds of a forward and a backward pass, the scores made twice: they are never kept."""
    head = (c.hidden_size, c.vocab_size)
    layers = c.layers * sum(_with_gradients_s(rows, *shape) for shape in layer_products(c))
    return layers + _with_gradients_s(scored, *head) + product_s(scored, *head)


def _with_gradients_s(rows: int, inner: int, columns: int) -> float:
    return (
        product_s(rows, inner, columns) + product_s(rows, columns, inner) + product_s(inner, rows, columns)
    )  # y = x·w, dx = dy·wᵀ, dw = xᵀ·dy


def product_s(rows: int, inner: int, columns: int, repeats: int = 8) -> float:
    """The fastest of a few."""
    x, w = jnp.ones((rows, inner)), jnp.ones((inner, columns))
    product = jax.jit(jnp.dot)
    product(x, w).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(x, w).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best
