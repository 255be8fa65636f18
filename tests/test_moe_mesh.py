"""Experts cut over the mesh: logits, gradients and routing equal those of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_post.models.config import Experts, ModelConfig
from jaxrl_post.models.decoder import Decoder, abstract, split
from jaxrl_post.models.placement import Placement
from sharding import TRAIN, make_mesh, place, tree_shardings

CONFIG = ModelConfig(
    "qwen2_moe", 96, 32, 48, layers=2, heads=4, kv_heads=4, head_dim=8, initializer_range=0.3,
    moe=Experts(8, 2, 16, shared_size=24),
)  # fmt: skip
B, T = 8, 12
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 96, (B, T)).astype(np.int32)
LENGTHS = RNG.integers(4, T + 1, B)
SEGMENTS = (np.arange(T)[None] < LENGTHS[:, None]).astype(np.int32)
MESHES = {
    "expert=2": {"expert": 2},
    "expert=8": {"expert": 8},
    "expert=4 tensor=2": {"expert": 4, "tensor": 2},
    "data=2 fsdp=2 expert=2": {"data": 2, "fsdp": 2, "expert": 2},
    "expert=2 sequence=2 tensor=2": {"expert": 2, "sequence": 2, "tensor": 2},
    "fsdp=8": {"fsdp": 8},
}


@functools.cache
def params():
    return split(Decoder(CONFIG, jax.random.key(0)))[1]


def program(sizes, dispatch="gather"):
    """On a mesh of `sizes`: logits, routing and the gradients of a fixed projection of the live positions' states."""
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))])
    moe = dataclasses.replace(CONFIG.moe, dispatch=dispatch)
    graphdef, shapes, axes = abstract(dataclasses.replace(CONFIG, moe=moe))
    shardings = tree_shardings(axes, shapes, TRAIN, mesh)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert"), "sequence")) if sizes else None
    probe = jnp.asarray(np.random.default_rng(4).standard_normal((B, T, 32)), jnp.float32)

    def loss(params):
        decoder = nnx.merge(graphdef, params)
        at = jnp.broadcast_to(jnp.arange(T), (B, T))
        x_BTD, routing = decoder.routed(jnp.asarray(TOKENS), at, jnp.asarray(SEGMENTS), 0 * at, Placement(rows))
        return (x_BTD * probe * SEGMENTS[..., None]).sum(), (decoder.logits(x_BTD), routing)

    run = jax.jit(jax.grad(loss, has_aux=True), in_shardings=(shardings,), out_shardings=None)
    grads, (logits, routing) = run(place(params(), shardings))
    return jax.device_get((grads, logits, routing))


@functools.cache
def alone():
    return program({})


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["gather", "padded"])
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_any_mesh_gives_the_logits_choices_and_gradients_of_one_device(sizes, dispatch):
    grads, logits, routing = program(sizes, dispatch)
    expected_grads, expected, expected_routing = alone()
    live = SEGMENTS.astype(bool)
    np.testing.assert_allclose(logits[live], expected[live], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(routing.choices[:, live], expected_routing.choices[:, live])
    scale = max(np.abs(g).max() for g in jax.tree.leaves(expected_grads))
    for actual, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(actual / scale, wanted / scale, rtol=0, atol=1e-5)
    assert np.abs(expected_grads["layers"]["router"]).max() > 1e-3 * scale
