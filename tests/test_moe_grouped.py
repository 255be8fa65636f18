"""Products grouped by expert as kernels for GPUs, interpreted: the numbers of the loop over blocks, on any mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from whole_runs import rollouts

from jaxrl_post import recipes
from jaxrl_post.loops.decoder_shape import model_config
from jaxrl_post.loops.online import run
from jaxrl_post.models.config import Experts
from jaxrl_post.models.grouped import Run, grouped_product
from jaxrl_post.models.moe import AXES, ROUTED, mixture, shapes
from jaxrl_post.models.placement import Placement
from jaxrl_post.observe.metrics import read_metrics
from sharding import TRAIN, make_mesh, place, tree_shardings

E, K, D, F = 4, 2, 48, 32
RNG = np.random.default_rng(0)
SHAPES = shapes(Experts(E, K, F), D)
WEIGHTS = {name: 0.3 * RNG.standard_normal(SHAPES[name]).astype(np.float32) for name in ROUTED}
H_BTD = RNG.standard_normal((8, 16, D)).astype(np.float32)
QUICK = ["mesh.allow_unused_devices=true", "mesh.fsdp=1", "rollout.max_new_tokens=8"]
PROBE = RNG.standard_normal(H_BTD.shape).astype(np.float32)


@functools.cache
def gradients(backend, **sizes):
    """Of a projection of the mixture's outputs to weights and states, and the outputs."""
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))])
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert"))) if sizes else None
    layer = mixture(Experts(E, K, F, backend=backend), Placement(rows))
    shardings = tree_shardings({name: AXES[name] for name in ROUTED}, WEIGHTS, TRAIN, mesh)

    def loss(weights, h_BTD):
        y_BTD, _ = layer(weights, h_BTD, None)
        return (y_BTD * PROBE).sum(), y_BTD

    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True), in_shardings=(shardings, rows))
    return jax.device_get(run(place(WEIGHTS, shardings), jnp.asarray(H_BTD) if rows is None else place(H_BTD, rows)))


def test_kernels_have_the_values_and_gradients_of_the_loop_over_blocks():
    jax.tree.map(close, gradients("interpreted"), gradients("blocked"))


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 2, "expert": 2, "tensor": 2}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_on_a_mesh_each_device_runs_its_own_rows_experts_and_part_of_their_width(sizes):
    jax.tree.map(close, gradients("interpreted", **sizes), gradients("blocked"))


@pytest.mark.slow
def test_experts_are_gathered_in_the_dtype_of_products_and_their_gradients_summed_in_the_weights():
    """Bfloat16 states, float32 weights cut over fsdp: gathers send half as much, gradients have no more than one
    rounding to bfloat16 on each device."""
    mesh = make_mesh({"fsdp": 4}, jax.devices()[:4])
    rows, half = NamedSharding(mesh, PartitionSpec("fsdp")), jnp.asarray(H_BTD, jnp.bfloat16)
    shardings = tree_shardings({name: AXES[name] for name in ROUTED}, WEIGHTS, TRAIN, mesh)

    def gradient(placed, backend):
        layer = mixture(Experts(E, K, F, backend=backend), Placement(placed))
        return jax.grad(lambda weights, h_BTD: (layer(weights, h_BTD, None)[0] * PROBE).sum())

    for backend in ("blocked", "interpreted"):
        run = jax.jit(gradient(rows, backend), in_shardings=(shardings, rows))
        on_mesh = run(place(WEIGHTS, shardings), place(half, rows))
        alone = jax.jit(gradient(None, backend))(WEIGHTS, half)
        assert {g.dtype for g in jax.tree.leaves(on_mesh)} == {np.dtype(np.float32)}
        for actual, wanted in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=0.01 * np.abs(wanted).max())
        gathers = re.findall(r"(\w+)\[[\d,]+\] = all_gather\[", str(run.trace(WEIGHTS, half).jaxpr))
        assert sorted(gathers) == ["bf16"] * 3 + ["f32"]  # the router stays exact


def close(actual, wanted):
    np.testing.assert_allclose(actual / np.abs(wanted).max(), wanted / np.abs(wanted).max(), rtol=0, atol=1e-5)


def test_blocks_beyond_the_last_are_zero_and_experts_without_any_get_no_gradient():
    """Three of five blocks are used; expert 1 of 3 has none. Float64 by hand; sums of bfloat16 products are float32."""
    rows, w = RNG.standard_normal((5, 16, 32)), RNG.standard_normal((3, 32, 16))
    rows, w = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (rows, w))
    experts, used = np.int32([0, 2, 2, 2, 2]), np.int32(3)
    dy = np.asarray(jnp.asarray(RNG.standard_normal((5, 16, 16)), jnp.bfloat16), np.float32)

    @jax.jit
    def run(rows, w, dy):
        product = lambda rows, w: grouped_product(
            rows, w, jnp.asarray(experts), jnp.asarray(used), Run(48, interpret=True)
        )
        y, pull = jax.vjp(product, rows, w)
        return y, *pull(dy)

    half = jnp.bfloat16
    y, dx, dw = run(jnp.asarray(rows, half), w, jnp.asarray(dy, half))
    assert (y.dtype, dx.dtype, dw.dtype) == (half, half, jnp.float32)
    live = np.arange(5)[:, None, None] < used
    np.testing.assert_allclose(np.float64(y), live * (rows.astype(np.float64) @ w[experts]), rtol=1e-2, atol=1e-2)
    expected = live * (dy.astype(np.float64) @ w[experts].transpose(0, 2, 1))
    np.testing.assert_allclose(np.float64(dx), expected, rtol=1e-2, atol=1e-2)
    own = lambda e: sum(rows[i].T.astype(np.float64) @ dy[i] for i in range(used) if experts[i] == e)
    np.testing.assert_allclose(dw, [own(0), np.zeros((32, 16)), own(2)], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_runs_sample_and_learn_as_with_the_loop_over_blocks(tmp_path):
    """The kernels in prefill, decode and update, on experts and a width that are cut."""
    changes = {"blocked": [], "grouped": ["mesh.data=2", "mesh.expert=2", "mesh.tensor=2"]}
    for backend, mesh in changes.items():
        overrides = [f"run_dir={tmp_path / backend}", f"model.moe.backend={backend}", "steps=2", *mesh]
        run(recipes.load("configs/tiny/moe_grpo.yaml", ["evaluation.enabled=false", *QUICK, *overrides]))
    for step in (1, 2):
        ids = [[sample["ids"] for sample in rollouts(tmp_path / backend, step)] for backend in changes]
        assert ids[0] == ids[1]
    blocked, grouped = (read_metrics(tmp_path / backend / "metrics.jsonl") for backend in changes)
    for record, wanted in zip(grouped, blocked, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            np.testing.assert_allclose(record[name], wanted[name], rtol=1e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("platform", "overrides", "backend"),
    [
        ("gpu", [], "grouped"),
        ("tpu", [], "ragged"),
        ("cpu", [], "blocked"),
        ("cpu", ["model.moe.backend=grouped"], "interpreted"),
        ("gpu", ["model.random.experts.size=48"], "blocked"),
        ("tpu", ["model.moe.backend=grouped"], "these devices are TPUs: set model.moe.backend=auto"),
        ("gpu", ["model.moe.backend=grouped"], "a width of 8 is not a multiple of 16: set model.moe.backend=auto"),
    ],
)
def test_auto_goes_by_the_platform_and_kernels_that_cannot_serve_are_refused(platform, overrides, backend):
    config = recipes.load("configs/tiny/moe_grpo.yaml", overrides)
    choose = lambda: model_config(config, None, 300, platform, tensor=8 if "width" in backend else 2).moe.backend
    if " " not in backend:
        assert choose() == backend
        return
    with pytest.raises(ValueError, match=backend):
        choose()
