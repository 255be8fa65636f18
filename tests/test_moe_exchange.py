"""Tokens exchanged along `expert`: what arrives where, its gradients, no token without room, bytes, and the choice."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_post import recipes
from jaxrl_post.loops.network import build_network
from jaxrl_post.models import exchange
from jaxrl_post.models.config import Experts
from jaxrl_post.models.moe import AXES, ROUTED, mixture, shapes
from jaxrl_post.models.placement import ANYWHERE, Placement
from sharding import TRAIN, make_mesh, place, tree_shardings
from sharding.report import Collective, Program

ROOT = Path(__file__).parent.parent
N, X, HELD, D = 4, 6, 2, 16
MOE = Experts(N * HELD, 2, 16)
RNG = np.random.default_rng(0)
CHOICES = {
    "any": np.argsort(RNG.random((N * X, MOE.count)))[:, :2],
    "all to one device": np.tile([5, 4], (N * X, 1)),
    "all but the last device": np.argsort(RNG.random((N * X, MOE.count - HELD)))[:, :2],
}
SPLIT = PartitionSpec("expert")


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What jax documents of `lax.ragged_all_to_all`, by a gather; NaN where the two ends disagree."""
    operands, starts, sizes, places = (
        lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    me, row = lax.axis_index(axis_name), jnp.arange(len(output))
    for source in range(len(sizes)):
        at = row - places[source, me]
        taken = operands[source][jnp.clip(starts[source, me] + at, 0, len(operand) - 1)]
        output = jnp.where(((at >= 0) & (at < sizes[source, me]))[:, None], taken, output)
    return jnp.where((recv_sizes == sizes[:, me]).all(), output, jnp.nan)


@functools.cache
def both_ways(transport):
    """(choices, h, y) -> what arrives, what is collected of y, and the gradients of both for y and for h."""

    def local(choices_Xk, h_XD, y_PD):
        route = exchange.route(lax.all_gather(choices_Xk, "expert"), HELD)
        arrived, pull = jax.vjp(lambda h: exchange.send(transport, route, h), h_XD)
        collected, push = jax.vjp(lambda y: exchange.collect(transport, route, y), y_PD)
        numbers = exchange.of_arrived(route, lax.all_gather(choices_Xk, "expert"), -1)
        return arrived, collected, *pull(y_PD), *push(h_XD), numbers

    mesh = make_mesh({"expert": N}, jax.devices()[:N])
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))


@pytest.mark.parametrize("transport", ["padded", "ragged"])
def test_a_token_goes_once_to_each_device_it_chose_and_sums_come_back(transport, monkeypatch):
    """And the gradient of each way is the other way."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    h, y = (RNG.standard_normal((n, 3)).astype(np.float32) for n in (N * X, N * N * X))
    for choices in CHOICES.values():
        arrived, collected, of_h, of_y, numbers = jax.device_get(both_ways(transport)(choices, h, y))
        expected, sums = np.zeros_like(y), np.zeros_like(h)
        of_choices = np.full((N * N * X, 2), -1)
        for device, source in itertools.product(range(N), range(N)):
            own = range(source * X, source * X + X)
            rows = [x for x in own if device in choices[x] // HELD]
            first = (device * N + source) * X
            places = slice(first, first + len(rows))
            expected[places], of_choices[places] = h[rows], choices[rows]
            sums[rows] += y[places]
        np.testing.assert_array_equal(arrived, expected)
        np.testing.assert_array_equal(of_y, expected)
        np.testing.assert_array_equal(numbers, of_choices)
        np.testing.assert_allclose(collected, sums, rtol=0, atol=1e-6)
        np.testing.assert_allclose(of_h, sums, rtol=0, atol=1e-6)


def test_rows_that_come_back_in_bfloat16_are_summed_in_float32():
    """256 and three ones are 260 to the nearest bfloat16, and 256 if added one by one in it."""
    back = np.repeat(np.float32([256, 1, 1, 1]), N * X)[:, None]
    choices = np.tile([0, 2, 4, 6], (N * X, 1))
    collected = both_ways("padded")(choices, jnp.zeros((N * X, 1), jnp.bfloat16), jnp.asarray(back, jnp.bfloat16))[1]
    assert collected.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(collected), 260.0)


# A layer.

WEIGHTS = {
    name: RNG.standard_normal(shape).astype(np.float32) * 0.4
    for name, shape in shapes(MOE, D).items()
    if name in ROUTED
}
H_BTD, PROBE = RNG.standard_normal((2, 8, 3, D)).astype(np.float32)
BYTES = X * D * 4  # of a device's tokens


@functools.cache
def layer(dispatch="gather", backend="blocked", **sizes):
    """Compiled (weights, h, choices) -> outputs, gradients and the router's choices, with its mesh."""
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))])
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert")))
    layouts = tree_shardings({name: AXES[name] for name in ROUTED}, WEIGHTS, TRAIN, mesh)
    mix = mixture(dataclasses.replace(MOE, dispatch=dispatch, backend=backend), Placement(rows) if sizes else ANYWHERE)

    def loss(weights, h_BTD, choices_BTk):
        y_BTD, routing = mix(weights, h_BTD, choices_BTk)
        return (y_BTD * PROBE).sum(), (y_BTD, routing.choices)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    jitted = jax.jit(run, in_shardings=(layouts, rows, rows), out_shardings=None)
    choices = jax.ShapeDtypeStruct((8, 3, 2), jnp.int32)
    compiled = jitted.lower(WEIGHTS, H_BTD, choices).compile()
    return compiled, lambda choices: compiled(place(WEIGHTS, layouts), *place((H_BTD, choices), (rows, rows))), mesh


def assert_like_one_device(dispatch, backend="blocked", **sizes):
    for choices in CHOICES.values():
        choices_BTk = choices.reshape(8, 3, 2).astype(np.int32)
        (_, (y, chosen)), grads = layer(dispatch, backend, **sizes)[1](choices_BTk)
        (_, (expected, _)), expected_grads = layer()[1](choices_BTk)
        np.testing.assert_array_equal(chosen, choices_BTk)
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
        for actual, wanted in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5 * max(1, np.abs(wanted).max()))
        assert np.abs(expected_grads[0]["router"]).max() > 1e-2


def test_outputs_and_gradients_are_those_of_one_device_even_if_all_tokens_choose_one_device():
    assert_like_one_device("padded", expert=4, tensor=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("interpreted", {"expert": 4, "tensor": 1}),
        ("ragged", {"expert": 4}),
        ("blocked", {"expert": 8}),
        ("blocked", {"data": 2, "fsdp": 2, "expert": 2}),
    ],
)
def test_with_other_products_and_meshes_too(backend, sizes):
    assert_like_one_device("padded", backend, **sizes)


@pytest.mark.slow
def test_and_by_the_ragged_transport(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    assert_like_one_device("ragged", expert=4, tensor=2)


def test_tokens_travel_out_and_back_and_are_gathered_nowhere():
    """And so do the gradients of both; what is gathered is choices and gates alone."""
    compiled, _, mesh = layer("padded", expert=4, tensor=2)
    collectives = Program(compiled.as_text()).collectives(mesh)
    found = {c.kind: (c.count, c.bytes) for c in collectives if c.axes == ("expert",)}
    of_choices = N * X * 2 * 4
    assert found == {
        "all-to-all": (4, 4 * N * BYTES),
        "all-gather": (2, 2 * of_choices),
        "reduce-scatter": (1, of_choices),  # gradients of gates
        "all-reduce": (1, 4),  # the loss
    }


# The choice.


def counted_share(E, k, devices):
    own = set(range(E // devices))
    sets = list(itertools.combinations(range(E), k))
    return sum(bool(own & set(chosen)) for chosen in sets) / len(sets)


def test_the_share_of_devices_that_a_token_goes_to_is_counted_over_all_sets_of_experts():
    for E, k, devices in [(8, 2, 2), (8, 2, 8), (8, 3, 4), (6, 4, 2), (4, 4, 2)]:
        assert exchange.share(Experts(E, k, 1), devices) == pytest.approx(counted_share(E, k, devices))
    assert exchange.share(Experts(128, 8, 1), 8) == pytest.approx(0.667, abs=1e-3)


@pytest.mark.parametrize(
    ("asked", "k", "devices", "platform", "chosen"),
    [
        ("auto", 8, 64, "gpu", "gather"),
        ("all_to_all", 8, 64, "gpu", "ragged"),
        ("auto", 8, 1, "tpu", "gather"),
        ("auto", 128, 4, "tpu", "gather"),  # every token goes to all
        ("auto", 8, 4, "tpu", "ragged"),
        ("auto", 8, 8, "tpu", "gather"),  # 0.67 of the bytes, over two links each
        ("auto", 2, 8, "tpu", "ragged"),
        ("auto", 2, 8, "cpu", "gather"),
        ("all_to_all", 2, 8, "cpu", "padded"),
        ("all_to_all", 128, 8, "tpu", "ragged"),
        ("gather", 8, 8, "gpu", "gather"),
    ],
)
def test_auto_takes_what_loads_links_less(asked, k, devices, platform, chosen):
    assert exchange.choose(asked, Experts(128, k, 1), devices, platform) == chosen


def network_of(*overrides):
    config = recipes.load("configs/tiny/moe_grpo.yaml", ["mesh.fsdp=1", *overrides])
    return build_network(config, None, dataclasses.make_dataclass("Bytes", ["vocab_size"])(260))


def test_a_recipe_asks_for_it_by_name_and_is_refused_where_it_means_nothing():
    dispatch = lambda *overrides: network_of(*overrides).model.moe.dispatch
    assert dispatch("mesh.expert=8") == "gather"
    assert dispatch("mesh.expert=8", "model.moe.dispatch=all_to_all") == "padded"
    for overrides, said in {
        ("mesh.data=8", "model.moe.dispatch=all_to_all"): "all_to_all: mesh.expert=1, .*: set mesh.expert larger, or",
        ("mesh.data=8", "model.moe.dispatch=all"): "model.moe.dispatch.*'auto', 'gather' or 'all_to_all'",
    }.items():
        with pytest.raises(ValueError, match=said):
            dispatch(*overrides)
    dense = ["model.random.family=qwen3", "model.random.experts=null", "model.moe.aux_loss_coef=0"]
    dense += ["model.moe.z_loss_coef=0", "model.moe.routing_replay=false", "model.moe.dispatch=gather"]
    with pytest.raises(ValueError, match=r"model\.moe\.dispatch=gather: a qwen3 model has no experts"):
        network_of("mesh.data=8", *dense)


# What a plan says of it.

RAGGED = """HloModule m

ENTRY %main (a: bf16[8,16], b: bf16[8,16], n: s64[4]) -> bf16[8,16] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[8,16]{1,0} parameter(1)
  %n = s64[4]{0} parameter(2)
  %start = ((bf16[8,16]{1,0}, bf16[8,16]{1,0}, s64[4]{0}, s64[4]{0}, s64[4]{0}, /*index=5*/s64[4]{0}), bf16[8,16]{1,0}) ragged-all-to-all-start(%a, %b, %n, %n, %n, /*index=5*/%n), replica_groups={{0,1,2,3}}
  ROOT %done = bf16[8,16]{1,0} ragged-all-to-all-done(%start)
}
"""  # noqa: E501


def test_what_a_ragged_exchange_sends_is_the_share_that_is_filled_of_what_there_is_room_for():
    mesh = make_mesh({"expert": 4}, jax.devices()[:4])
    assert Program(RAGGED).collectives(mesh) == [Collective("ragged-all-to-all", ("expert",), 1, 256, 192.0)]
    assert Program(RAGGED, filled=0.5).collectives(mesh)[0].sent == 96.0


LINK = """
  %gather.NUMBER = s32[32]{0} all-gather(%x), channel_id=CHANNEL, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="CHAIN"}
"""  # noqa: E501


def test_a_gather_in_a_chain_of_pieces_is_one():
    """As TPUs' compiler writes the gather of choices; others share a channel or a chain, and not both."""
    mesh = make_mesh({"expert": 4}, jax.devices()[:4])
    link = lambda i, channel, chain: LINK.replace("NUMBER", str(i)).replace("CHANNEL", channel).replace("CHAIN", chain)
    pieces = [("61", "0"), ("61", "0"), ("59", "0"), ("61", "0"), ("61", "1")]
    lines = "".join(link(i, *piece).lstrip("\n") for i, piece in enumerate(pieces))
    text = f"HloModule m\n\nENTRY %main (x: s32[8]) -> s32[32] {{\n  %x = s32[8]{{0}} parameter(0)\n{lines}}}\n"
    (gathers,) = Program(text).collectives(mesh)
    assert (gathers.kind, gathers.count, gathers.bytes) == ("all-gather", 3, 3 * 128)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200:1x8", "v5e:2x4"])
def test_an_update_for_other_devices_exchanges_rows_and_gathers_no_tokens(target):
    """8 devices with 64 tokens of 256 numbers each: out and back, out again where a layer is made anew, and both
    gradients, in 2 layers."""
    script = ROOT / "tests" / "compiled_exchange.py"
    environ = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, script, target], cwd=ROOT, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    tokens, numbers = 8 * 64, 256
    assert (found["dispatch"], found["shape"]) == ("ragged", [8, 64])
    assert found["sent"]["ragged-all-to-all"] == {str(tokens * numbers * 2): 5 * 2}
    gathers = {int(size): count for size, count in found["sent"]["all-gather"].items()}
    assert max(gathers) <= tokens * 2 * (4 + 4)  # choices and gates
    assert sum(gathers.values()) <= 2 * 2 * 2
