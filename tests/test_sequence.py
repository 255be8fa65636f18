"""Rows cut along time: attention, log-probs and gradients equal those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.config import Config
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.planning import stand_in_job
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
        pytest.param("ulysses", {"sequence": 2, "tensor": 2}, marks=pytest.mark.slow),
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


def test_the_ring_is_taken_unless_heads_are_to_be_exchanged():
    assert [sequence.choose(asked, 32, 8, 4, 2) for asked in ("auto", "ring", "ulysses")] == ["ring", "ring", "ulysses"]


def job(training, **mesh):
    raw = {
        "model": {"random": {"heads": 4, "kv_heads": 2}},
        "mesh": mesh,
        "data": {"prompts_per_step": 8, "max_prompt_tokens": 16},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 16},
        "training": training,
    }
    return stand_in_job(Config.model_validate(raw), jax.devices())


def test_heads_that_cannot_be_exchanged_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"sequence_attention=ulysses.*sequence=2 × tensor=2 = 4.*has 2 .*take ring"):
        job({"sequence_attention": "ulysses"}, sequence=2, tensor=2, fsdp=2)


@pytest.mark.parametrize(("length", "kind", "next_length"), [(44, "ring", 48), (41, "ulysses", 42)])
def test_rows_that_cannot_be_cut_are_refused_with_the_next_length(length, kind, next_length):
    sizes = {"sequence": 2, "fsdp": 4} if kind == "ulysses" else {"sequence": 4, "fsdp": 2}
    with pytest.raises(ValueError, match=rf"row of {length} .*sequence_attention={kind}.* {next_length}\)"):
        Learner(job({"sequence_attention": kind, "row_length": length}, **sizes))
