"""Rows cut along time: attention, log-probs and gradients equal those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.models import sequence
from jaxrl_post.models.attention import packed_attention
from sharding import make_mesh

RNG = np.random.default_rng(0)
B, T, H, K, N = 2, 48, 8, 4, 8


def packed_rows(B=B, T=T):
    """Segments of uneven lengths with a trunk and branches, over the borders of all devices, and padding at the end."""
    segments, branches = np.zeros((2, B, T), np.int32)
    for row, (lengths, trunks) in enumerate([((5, 31, 7), (2, 9, 7)), ((44,), (11,))][:B]):
        start = 0
        for n, (length, trunk) in enumerate(zip(lengths, trunks, strict=True)):
            segments[row, start : start + length] = n + 1
            branches[row, start + trunk : start + length] = np.arange(length - trunk) * 3 // max(length - trunk, 1) + 1
            start += length
    return segments, branches


QKV = [RNG.standard_normal((B, T, heads, N)).astype(np.float32) for heads in (H, K, K)]
PROBE = RNG.standard_normal((B, T, H, N)).astype(np.float32)


def value_and_gradients(attention):
    """Outputs, and the gradients of a fixed projection of those of live columns."""
    segments, branches = packed_rows()

    def loss(qkv):
        out = attention(*qkv, jnp.asarray(segments), jnp.asarray(branches))
        return (out * PROBE).sum(), out

    return jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(list(map(jnp.asarray, QKV))))


@functools.cache
def alone():
    return value_and_gradients(packed_attention)


def cut(kind, sizes):
    """Attention of rows cut over a mesh, with heads cut by the compiler."""
    mesh = make_mesh(sizes)
    columns = P(None, "sequence")

    def local(*inputs):
        arranged = [sequence.arrange(kind, x) for x in inputs]
        return sequence.restore(kind, sequence.attention(kind)(*arranged))

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(columns,) * 5, out_specs=columns, axis_names={"sequence"}, check_vma=False
    )
    heads = NamedSharding(mesh, P(None, "sequence", "tensor"))
    return lambda q, k, v, *rest: run(*(jax.lax.with_sharding_constraint(x, heads) for x in (q, k, v)), *rest)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("ring", {"sequence": 4, "tensor": 2}),
        ("ulysses", {"sequence": 2, "tensor": 2}),
        pytest.param("ring", {"sequence": 3}, marks=pytest.mark.slow),
        pytest.param("ring", {"sequence": 8}, marks=pytest.mark.slow),
        pytest.param("ulysses", {"sequence": 4}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("query_chunk", [512, pytest.param(2, marks=pytest.mark.slow)])
def test_attention_over_devices_equals_that_of_one(kind, sizes, query_chunk, monkeypatch):
    expected_grads, expected = alone()
    monkeypatch.setattr(sequence, "QUERY_CHUNK", query_chunk)
    grads, out = value_and_gradients(cut(kind, sizes))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    for actual, wanted in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5)
    assert min(np.abs(wanted).max() for wanted in expected_grads) > 0.1
