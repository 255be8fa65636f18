"""The mixture of experts by itself: gates, grouped products, balance and z-loss, replay, and what is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jaxrl_post import recipes
from jaxrl_post.config import RandomModel
from jaxrl_post.loops.decoder_shape import random_config
from jaxrl_post.loops.groups import completion_from_json, completion_to_json
from jaxrl_post.loops.network import build_network
from jaxrl_post.models import moe
from jaxrl_post.models.config import Experts, ModelConfig, from_huggingface, to_huggingface
from jaxrl_post.models.decoder import abstract
from jaxrl_post.models.moe import Routing
from jaxrl_post.models.placement import ANYWHERE
from jaxrl_post.rollout.sampler import check_stops_early
from jaxrl_post.training import routing as routers
from jaxrl_post.training.loss import Tally
from jaxrl_post.training.optimizer import clip
from jaxrl_post.types import Completion, StopReason, TrainBatch, Trajectory
from sharding import TRAIN, make_mesh, place, tree_shardings

E, K, D, F = 5, 2, 12, 7
RNG = np.random.default_rng(0)
WEIGHTS = {
    name: RNG.standard_normal(shape).astype(np.float32) * 0.4
    for name, shape in moe.shapes(Experts(E, K, F, shared_size=9), D).items()
}
H_BTD = RNG.standard_normal((2, 40, D)).astype(np.float32)
TINY = "configs/tiny/moe_grpo.yaml"


def dense(h_XD, choices_Xk, gates_Xk):
    """Float64, a token and an expert at a time."""
    silu = lambda x: x / (1 + np.exp(-x))
    gate, up, down = (WEIGHTS[f"expert_{name}"].astype(np.float64) for name in ("gate", "up", "down"))
    out = np.zeros_like(h_XD, dtype=np.float64)
    for x, h in enumerate(h_XD.astype(np.float64)):
        for e, g in zip(choices_Xk[x], gates_Xk[x], strict=True):
            out[x] += g * ((silu(h @ gate[e]) * (h @ up[e])) @ down[e])
    return out


# Gates.


@pytest.mark.parametrize(
    ("normalized", "gates"), [(True, [0.7310586, 0.2689414]), (False, [0.6439142, 0.2368828])], ids=["on", "off"]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gates_are_chosen_from_the_softmax_over_all_experts_in_float32(normalized, gates, dtype):
    # 1 and 1/128 are exact in bfloat16 where their sum is not: a router in bfloat16 would lose the second.
    router = np.array([[2.0, 1.0, 0.0, -1.0], [128e-6, 0, 0, 0]], dtype)
    gate = jax.jit(functools.partial(moe.route, Experts(4, 2, 1, normalized=normalized)))
    routing, found = gate(router, np.ones((1, 2), dtype))
    assert routing.logits.dtype == found.dtype == jnp.float32
    np.testing.assert_allclose(routing.logits[0], [2.000128, 1, 0, -1], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(routing.choices, [[0, 1]])
    np.testing.assert_allclose(found[0], gates, rtol=0, atol=5e-5)


# Products grouped by expert.


@functools.cache
def mixture_and_gradient(backend):
    layer = moe.mixture(Experts(E, K, F, shared_size=9, backend=backend), ANYWHERE)
    probe = np.random.default_rng(1).standard_normal(H_BTD.shape).astype(np.float32)

    def loss(weights, h_BTD, choices):
        y_BTD, routing = layer(weights, h_BTD, choices)
        return (y_BTD * probe).sum(), (y_BTD, routing)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


CHOICES = {
    "own": None,
    "all to one expert": np.tile(np.uint8([3, 1]), (2, 40, 1)),
    "some to none": np.where(RNG.random((2, 40, 1)) < 0.3, np.uint8([0, 4]), np.uint8([2, 4])),
}


@pytest.mark.parametrize(
    ("backend", "choices"), [*(("blocked", x) for x in CHOICES.values()), ("ragged", CHOICES["some to none"])]
)
def test_each_token_gets_its_experts_whatever_their_load(backend, choices):
    (_, (y_BTD, routing)), _ = mixture_and_gradient(backend)(WEIGHTS, H_BTD, choices)
    h_XD, chosen = H_BTD.reshape(-1, D), np.asarray(routing.choices).reshape(-1, K)
    logits = h_XD.astype(np.float64) @ WEIGHTS["router"]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    if choices is None:
        np.testing.assert_array_equal(np.sort(chosen), np.sort(np.argsort(-logits)[:, :K]))
    else:
        np.testing.assert_array_equal(chosen, choices.reshape(-1, K))
    gates = np.take_along_axis(probs, chosen, 1)
    shared = {name: WEIGHTS[f"shared_{name}"].astype(np.float64) for name in ("gate", "up", "down", "scale")}
    a = h_XD @ shared["gate"]
    expected = (a / (1 + np.exp(-a)) * (h_XD @ shared["up"])) @ shared["down"]
    expected = expected / (1 + np.exp(-(h_XD @ shared["scale"])))
    expected += dense(h_XD, chosen, gates / gates.sum(-1, keepdims=True))
    np.testing.assert_allclose(y_BTD.reshape(-1, D), expected, rtol=0, atol=1e-5)


def test_the_loop_over_blocks_has_the_gradients_of_ragged_products():
    for choices in (CHOICES["some to none"], CHOICES["all to one expert"]):
        grads = [mixture_and_gradient(backend)(WEIGHTS, H_BTD, choices)[1] for backend in ("blocked", "ragged")]
        for blocked, ragged in zip(*map(jax.tree.leaves, grads), strict=True):
            np.testing.assert_allclose(blocked, ragged, rtol=0, atol=2e-5)
        assert np.abs(grads[0][0]["router"]).max() > 1e-2  # along replayed choices, too


def test_blocks_hold_every_assignment_once_and_as_few_as_can_be():
    choices = np.random.default_rng(2).integers(0, 6, 60)  # 5 is of no expert
    blocks = jax.device_get(jax.jit(moe.blocks_of, static_argnums=(1, 2, 3))(choices, 30, 5, 16))
    assert blocks.used == sum(-(-np.sum(choices == e) // 16) for e in range(5))
    for assignment, (at, e) in enumerate(zip(blocks.at, choices, strict=True)):
        if e == 5:
            assert at == len(blocks.token)
        else:
            assert (blocks.token[at], blocks.expert[at // 16]) == (assignment // 2, e)
    assert np.sum(blocks.token < 30) == np.sum(choices < 5)


# Losses: probabilities of three live positions and five of padding.

LIVE = np.log([[0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1], [0.2, 0.6, 0.1, 0.1]])
PADDING = np.log([[0.05, 0.05, 0.05, 0.85]])


def batch_of(count_BT, length=None):
    """Rows of which each position predicts so many targets."""
    rows = [np.repeat(np.arange(len(row)), row) for row in np.asarray(count_BT)]
    M = length or max(map(len, rows))
    pad = lambda x, value: np.concatenate([x, np.full(M - len(x), value)])
    source = np.stack([pad(row, 0) for row in rows]).astype(np.int32)
    mask = np.stack([pad(np.ones(len(row)), 0) for row in rows]).astype(bool)
    shape = np.asarray(count_BT).shape
    fields = dict.fromkeys(TrainBatch._fields, np.zeros(mask.shape, np.float32))
    return TrainBatch(**fields | {"tokens": np.zeros(shape, np.int32), "source": source, "mask": mask})


@functools.partial(jax.jit, static_argnames="k")
def balance(logits_LBTE, rows, k):
    """The whole update's balance and z-loss, their gradients, and what `Whole` says of it."""
    count, L = routers.target_counts(rows), len(logits_LBTE)
    load_LE = routers.load(jax.lax.top_k(logits_LBTE, k)[1], count, logits_LBTE.shape[-1])
    whole = routers.Whole(count.sum(), load_LE.sum(0) / (L * count.sum()))
    aux, d_aux = jax.value_and_grad(routers.balance_loss)(logits_LBTE, count, whole)
    z, d_z = jax.value_and_grad(routers.z_loss)(logits_LBTE, count, whole)
    return (aux, z), (d_aux, d_z), count, whole


@pytest.mark.parametrize("padding", [5, 9])
def test_balance_and_z_loss_do_not_see_padding_nor_send_it_a_gradient(padding):
    logits = np.float32(np.concatenate([LIVE, np.tile(PADDING, (padding, 1))])[None, None] + 0.3)
    (aux, z), gradients, *_ = balance(logits, batch_of([[1, 1, 1] + [0] * padding]), k=1)
    np.testing.assert_allclose(aux, 1.6, rtol=1e-6)
    np.testing.assert_allclose(z, 0.09, rtol=1e-5)
    for gradient in jax.device_get(gradients):
        assert np.abs(gradient[0, 0, :3]).max() > 1e-2
        np.testing.assert_array_equal(gradient[0, 0, 3:], 0.0)


def test_balance_loss_is_that_of_transformers_with_a_mask_over_all_layers():
    logits = np.random.default_rng(3).standard_normal((3, 2, 6, 8)).astype(np.float32)
    mask = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    layers = tuple(torch.tensor(layer.reshape(-1, 8)) for layer in logits)
    theirs = load_balancing_loss_func(layers, 8, 3, torch.tensor(mask))
    np.testing.assert_allclose(balance(logits, batch_of(mask), k=3)[0][0], theirs, rtol=1e-6)
    np.testing.assert_allclose(balance(1e-4 * logits, batch_of(mask), k=3)[0][0], 3.0, rtol=1e-3)  # k in balance


def test_the_loss_of_an_update_is_the_sum_over_its_micro_batches():
    rng = np.random.default_rng(4)
    logits, counts = rng.standard_normal((2, 4, 5, 6)).astype(np.float32), rng.integers(0, 3, (4, 5))
    (aux, z), _, count, whole = balance(logits, batch_of(counts), k=2)
    np.testing.assert_array_equal(count, counts)
    np.testing.assert_allclose(whole.load_E.sum(), 2.0, rtol=1e-6)
    both = jax.jit(lambda *part: (routers.balance_loss(*part), routers.z_loss(*part)))
    parts = np.sum([both(logits[:, i : i + 1], count[i : i + 1], whole) for i in range(4)], axis=0)
    np.testing.assert_allclose(parts, [aux, z], rtol=1e-6)


def test_load_metrics_tell_the_busiest_the_idlest_and_the_choices_that_differ():
    logits = jnp.asarray([[[[3.0, 2, 1, 0], [3, 2, 1, 0], [0, 0, 8, 9]]]])
    replayed = jnp.asarray([[[[0, 1], [0, 3], [3, 2]]]])  # one of six differs
    options = recipes.load(TINY).model.moe
    rows = batch_of([[1, 2, 0]])
    empty = Tally(jnp.float32(3), {}, {"training/rollout_probs_diff_square": jnp.float32(0)} | zero_sums(), {})
    whole = routers.Whole(jnp.float32(3), jnp.zeros(4))
    batch = routers.routed(rows, np.zeros((1, 3, 1, 2)))
    loss = lambda *parts: routers.load_metrics(routers.with_router(*parts, options)[1], {})
    found = jax.device_get(jax.jit(loss)(0.0, empty, Routing(logits, replayed), batch, whole))
    share = np.array([3, 1, 0, 2]) / 6
    np.testing.assert_allclose(found["actor/moe/max_share"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(found["actor/moe/min_share"], 0.0)
    np.testing.assert_allclose(found["actor/moe/max_vio"], 1.0, rtol=1e-6)
    entropy = -(share[share > 0] * np.log(share[share > 0])).sum() / np.log(4)
    np.testing.assert_allclose(found["actor/moe/load_entropy"], entropy, rtol=1e-6)
    np.testing.assert_allclose(found["actor/moe/dropped_fraction"], 0.0, atol=1e-7)
    np.testing.assert_allclose(found["rollout_corr/routing_diff_fraction"], (0 + 2 * 0.5) / 3, rtol=1e-6)


def zero_sums():
    return {"training/rollout_probs_diff_mean": jnp.float32(0)}


def test_choices_lie_where_their_tokens_do_in_packed_rows():
    """Two responses share a prompt of 3 tokens; a third sequence lies in the row after them."""
    of = lambda first, n: (first + np.arange(n, dtype=np.uint8))[:, None, None]
    sequences = [(3, 2, of(10, 4)), (3, 3, np.concatenate([of(10, 3), of(20, 2)])), (2, 1, of(30, 2))]
    trajectories = [
        Trajectory(0, tuple(range(p)), np.zeros(n, np.int32), np.zeros(n, np.float32), 1.0, choices=choices)
        for p, n, choices in sequences
    ]
    # Columns: prompt 0-2, first response 3, second 4-5, prompt of the third 6-7.
    source, number = [2, 3, 2, 4, 5, 7], [1, 1, 2, 2, 2, 3]
    fields = dict.fromkeys(TrainBatch._fields, np.zeros((1, 1, 8), np.int32))
    fields |= {
        "source": np.int32([[[*source, 0, 0]]]),
        "advantage": np.float32([[[*number, 0, 0]]]),
        "mask": np.arange(8)[None, None] < 6,
    }
    packed = routers.packed_choices(TrainBatch(**fields), trajectories, 64)
    np.testing.assert_array_equal(packed[0, 0, :, 0, 0], [10, 11, 12, 13, 20, 21, 30, 31])


def test_choices_of_a_carried_group_survive_a_checkpoint():
    choices = np.random.default_rng(0).integers(0, 300, (4, 2, 2)).astype(np.uint16)
    one = np.zeros(3, np.float32)
    saved = completion_to_json(Completion(0, np.int32([1, 2, 3]), one, one, StopReason.STOP, choices=choices))
    np.testing.assert_array_equal(completion_from_json(json.loads(json.dumps(saved))).choices, choices)


# The optimizer.


@pytest.mark.parametrize("sizes", [{}, {"expert": 4}, {"expert": 2, "fsdp": 2, "tensor": 2}])
def test_the_clip_norm_counts_experts_cut_over_the_mesh_once(sizes):
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))])
    grads = {"experts": np.full((4, 2, 2), 3 / 4, np.float32), "norm": np.full(4, 2, np.float32)}
    axes = {"experts": ("expert", "embed", "mlp"), "norm": (None,)}
    placed = place(grads, tree_shardings(axes, grads, TRAIN, mesh))
    clipped, norm = jax.jit(lambda g: clip(g, 1.0))(placed)
    np.testing.assert_allclose(norm, 5.0, rtol=1e-6)
    np.testing.assert_allclose(clipped["experts"], 0.2 * 3 / 4, rtol=1e-6)
    np.testing.assert_allclose(clipped["norm"], 0.2 * 2, rtol=1e-6)


# What is refused.

QWEN3_MOE = to_huggingface(ModelConfig("qwen3_moe", 96, 32, 48, 2, 4, 2, 8, moe=Experts(4, 2, 16)))
MIXTRAL = to_huggingface(ModelConfig("mixtral", 96, 32, 48, 2, 4, 2, 8, moe=Experts(4, 2, 48)))
QWEN2_MOE = to_huggingface(ModelConfig("qwen2_moe", 96, 32, 48, 2, 4, 2, 8, moe=Experts(4, 2, 16, shared_size=8)))


@pytest.mark.parametrize(
    ("raw", "change", "said"),
    [
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        (QWEN3_MOE, {"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds the 4 experts"),
        (QWEN3_MOE, {"num_experts": None}, "num_local_experts"),
        (QWEN3_MOE, {"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
        (QWEN3_MOE, {"norm_topk_prob": "yes"}, "norm_topk_prob='yes'"),
        (QWEN2_MOE, {"qkv_bias": False}, "qkv_bias=False"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window=4096"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ],
)
def test_a_config_json_that_would_change_the_numbers_is_refused_by_name(raw, change, said):
    assert from_huggingface(json.loads(json.dumps(raw))).moe is not None
    with pytest.raises(ValueError, match=said):
        from_huggingface(raw | change)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["model.random.family=llama", "model.random.experts=null"],
            "model.moe.aux_loss_coef=0.001: a llama model has",
        ),
        (["model.random.experts=null"], "family=qwen3_moe needs experts"),
        (["model.random.family=llama"], "family=llama has no experts"),
        (["model.random.experts.per_token=9"], "per_token=9 exceeds count=8"),
        (["mesh.expert=3", "mesh.allow_unused_devices=true", "mesh.fsdp=1"], "expert"),
        (["mesh.expert=2", "mesh.fsdp=4", "model.dtype=bfloat16"], "bfloat16 with mesh.expert=2 does not run on CPUs"),
        (["mesh.tensor=2", "mesh.fsdp=4", "model.dtype=bfloat16"], "bfloat16 with mesh.tensor=2 does not run on CPUs"),
        (["rollout.partial={}"], "routing_replay cannot follow samples"),
    ],
)
def test_a_recipe_that_asks_experts_for_what_they_cannot_do_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        network_of(recipes.load(TINY, changes))


def test_replicas_that_share_experts_cannot_stop_early():
    config = from_huggingface(QWEN3_MOE)
    check_stops_early(config, make_mesh({"data": 2}, jax.devices()[:2]))
    with pytest.raises(ValueError, match=r"mesh.expert=2: .* set mesh.expert=1, or rollout.partial=null"):
        check_stops_early(config, make_mesh({"expert": 2}, jax.devices()[:2]))


def network_of(config):
    return build_network(config, None, dataclasses.make_dataclass("Bytes", ["vocab_size"])(260))


def test_a_random_mixture_has_the_parameters_it_counts():
    for family in ("mixtral", "qwen2_moe", "qwen3_moe"):
        config = random_config(RandomModel(family=family, experts={"count": 4, "per_token": 2, "size": 24}), 260)
        _, shapes, _ = abstract(config)
        assert config.parameter_count() == sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert from_huggingface(to_huggingface(config)) == config
