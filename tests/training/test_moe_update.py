"""An update of a mixture: routers' losses and gradients do not depend on the split into rows, choices are replayed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_training import assert_trees_close, sgd, tiny_params, trajectories

from jaxrl_post.config import GRPO
from jaxrl_post.config_model import Mixture
from jaxrl_post.models.config import Experts, ModelConfig
from jaxrl_post.models.decoder import abstract
from jaxrl_post.training.loss import policy_loss
from jaxrl_post.training.packing import PackShape, pack
from jaxrl_post.training.routing import choice_sharding, packed_choices
from jaxrl_post.training.state import init_state, state_shardings
from jaxrl_post.training.update import batch_shardings, make_update
from jaxrl_post.types import RoutedBatch
from sharding import make_mesh, place

CONFIG = ModelConfig(
    "qwen3_moe", 32, 16, 32, layers=2, heads=4, kv_heads=2, head_dim=8, initializer_range=0.3, moe=Experts(4, 2, 12)
)
OPTIONS = Mixture(aux_loss_coef=0.5, z_loss_coef=0.1)
SAMPLES = [dataclasses.replace(t, train=True) for t in trajectories() if len(t.response_ids)]
ONE, SPLIT = PackShape(4, 64, 64, 1), PackShape(2, 24, 24, 8, batch_shards=2)
pytestmark = pytest.mark.slow


@functools.cache
def program(shape, sizes, replay, dispatch):
    mesh = make_mesh(dict(sizes), jax.devices()[: int(np.prod([n for _, n in sizes]))])
    moe = dataclasses.replace(CONFIG.moe, dispatch=dispatch)
    graphdef, params, axes = abstract(dataclasses.replace(CONFIG, moe=moe))
    optimizer, rows = sgd(1.0), batch_shardings(shape, mesh)
    shardings = state_shardings(params, axes, optimizer, mesh)
    read = RoutedBatch(rows, choice_sharding(rows)) if replay else rows
    update = make_update(
        graphdef, optimizer, policy_loss(GRPO(), num_sequences=1), temperature=0.7, chunk=16, shardings=shardings,
        batch_shardings=read, mixture=OPTIONS,
    )  # fmt: skip
    return update, read, lambda params: init_state(params, optimizer, shardings)


def step(shape, samples, sizes=(), replay=False, dispatch="gather", **packing):
    """Parameters and metrics after one update."""
    update, shardings, start = program(shape, sizes, replay, dispatch)
    batch, n_micro, _ = pack(samples, shape, aggregation="token-mean", keep_all=True, **packing)
    if replay:
        numbered = [dataclasses.replace(t, advantage=float(i)) for i, t in enumerate(samples, start=1)]
        rows = pack(numbered, shape, aggregation="token-mean", keep_all=True, **packing)[0]
        batch = RoutedBatch(batch, packed_choices(rows, samples, 4))
    state, metrics, _ = update(start(tiny_params(CONFIG)[1]), place(batch, shardings), np.int32(n_micro))
    return jax.device_get(state.params), jax.device_get(metrics)


@functools.cache
def alone():
    """Routing of each sample's tokens by itself, but for the last: logits [N, L, T, E] and choices [N, L, T, k]."""
    graphdef, params = tiny_params(CONFIG)
    tokens = np.zeros((len(SAMPLES), 24), np.int32)
    for row, t in zip(tokens, SAMPLES, strict=True):
        row[: len(t.prompt_ids) + len(t.response_ids)] = [*t.prompt_ids, *t.response_ids]
    at, ones = np.broadcast_to(np.arange(24), tokens.shape), np.ones_like(tokens)
    run = jax.jit(lambda params: nnx.merge(graphdef, params).routed(tokens, at, ones, 0 * ones)[1])
    routing = jax.device_get(run(jax.tree.map(jnp.asarray, params)))
    return np.moveaxis(routing.logits, 1, 0), np.moveaxis(routing.choices, 1, 0)


def with_choices(change=lambda choices: choices):
    _, choices_NLTk = alone()
    lengths = [len(t.prompt_ids) + len(t.response_ids) - 1 for t in SAMPLES]
    return [
        dataclasses.replace(t, choices=change(np.moveaxis(own, 0, 1)[:n]).astype(np.uint8))
        for t, own, n in zip(SAMPLES, choices_NLTk, lengths, strict=True)
    ]


def test_router_losses_are_means_over_all_targets_whatever_the_split():
    """Prompts shared or not, one micro-batch or seven, one device or experts cut over several."""
    params, metrics = step(ONE, SAMPLES)
    others = [
        step(SPLIT, SAMPLES, share_prefix=False),
        step(SPLIT, SAMPLES, sizes=(("expert", 2), ("tensor", 2))),
        step(SPLIT, SAMPLES, sizes=(("expert", 2),), dispatch="padded"),
    ]
    for other_params, other in others:
        assert_trees_close(other_params, params, rtol=0, atol=3e-5)
        for name in metrics:
            np.testing.assert_allclose(other[name], metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
    logits, choices = alone()
    ends = [(len(t.prompt_ids), len(t.prompt_ids) + len(t.response_ids)) for t in SAMPLES]
    predicting = lambda x: np.concatenate([row[:, p - 1 : end - 1] for row, (p, end) in zip(x, ends, strict=True)], 1)
    logits, choices = np.float64(predicting(logits)), predicting(choices)
    normal = np.exp(logits).sum(-1, keepdims=True)
    f_E = np.array([np.sum(choices == e) for e in range(4)]) / choices[..., 0].size
    np.testing.assert_allclose(
        metrics["actor/moe/aux_loss"], 4 * np.sum(f_E * (np.exp(logits) / normal).mean((0, 1))), rtol=1e-5
    )
    np.testing.assert_allclose(metrics["actor/moe/z_loss"], np.mean(np.log(normal) ** 2), rtol=1e-5)
    of_layers = np.stack([[np.mean(choices[layer] == e) for e in range(4)] for layer in range(2)])
    np.testing.assert_allclose(metrics["actor/moe/max_share"], of_layers.max(), rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/moe/dropped_fraction"], 0.0, atol=1e-6)


def test_replaying_the_routers_own_choices_changes_nothing_and_others_still_teach_the_router():
    params, metrics = step(ONE, SAMPLES)
    same_params, same = step(ONE, with_choices(), replay=True)
    assert_trees_close(same_params, params, rtol=0, atol=3e-5)
    for name in metrics:
        np.testing.assert_allclose(same[name], metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert same["rollout_corr/routing_diff_fraction"] == 0.0
    cut_params, cut = step(SPLIT, with_choices(), sizes=(("expert", 2),), replay=True, dispatch="padded")
    assert_trees_close(cut_params, params, rtol=0, atol=3e-5)
    assert cut["rollout_corr/routing_diff_fraction"] == 0.0
    moved, other = step(ONE, with_choices(lambda choices: (choices + 1) % 4), replay=True)
    assert other["rollout_corr/routing_diff_fraction"] > 0.3
    router = tiny_params(CONFIG)[1]["layers"]["router"]
    assert np.abs(moved["layers"]["router"] - router).max() > 1e-3
    assert np.abs(moved["layers"]["router"] - params["layers"]["router"]).max() > 1e-3
