"""Schedule, AdamW against torch, and the global norm on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_post import config
from jaxrl_post.training.optimizer import clip, decays, make_optimizer, schedule
from jaxrl_post.training.state import TrainState, init_state, state_shardings
from jaxrl_post.training.update import apply_gradients
from sharding import make_mesh


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [1.0, 2.0, 2.0, 1.55, 1.1, 0.65]),  # f 0.1: falls 2·0.9/4 a step
        ("cosine", [1.0, 2.0, 2.0, 2 * (0.1 + 0.9 * (1 + 0.5**0.5) / 2), 1.1, 2 * (0.1 + 0.9 * (1 - 0.5**0.5) / 2)]),
    ],
)
def test_schedules_by_hand(kind, expected):
    options = config.Optimizer(learning_rate=2.0, schedule=kind, warmup_steps=2, final_fraction=0.1)
    rates = [float(schedule(options, steps=6)(s)) for s in range(6)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_all_updates_of_a_step_share_its_rate():
    options = config.Optimizer(learning_rate=4.0, schedule="linear")
    optimizer = make_optimizer(options, steps=4, updates_per_step=3)
    rates = [float(optimizer.learning_rate(jnp.int32(u))) for u in range(12)]
    np.testing.assert_allclose(rates, np.repeat([4.0, 3.0, 2.0, 1.0], 3), rtol=1e-6)


def test_norm_gains_and_biases_do_not_decay():
    leaves = ("attention_norm", "q", "q_bias", "q_norm", "gate")
    params = {"embed": 0, "norm": 0, "head": 0, "layers": dict.fromkeys(leaves, 0)}
    assert decays(params) == {
        "embed": True,
        "norm": False,
        "head": True,
        "layers": {"attention_norm": False, "q": True, "q_bias": False, "q_norm": False, "gate": True},
    }


def _single_device_state(params, axes, optimizer):
    shardings = state_shardings(params, axes, optimizer, make_mesh({}, jax.devices()[:1]))
    return init_state(params, optimizer, shardings)


def test_adamw_with_clipping_follows_torch():
    rng = np.random.default_rng(0)
    draw = lambda: {"w": rng.standard_normal((3, 4), np.float32), "norm": rng.standard_normal(4, np.float32)}
    params, grads = draw(), [draw() for _ in range(3)]
    options = config.Optimizer(learning_rate=0.05, b2=0.95, weight_decay=0.3, max_grad_norm=1.5)
    optimizer = make_optimizer(options, steps=3)
    state = _single_device_state(params, {"w": (None, None), "norm": (None,)}, optimizer)
    w, norm = (torch.nn.Parameter(torch.tensor(params[k])) for k in ("w", "norm"))
    groups = [{"params": [w], "weight_decay": 0.3}, {"params": [norm], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95))
    for grad in grads:
        state, metrics = apply_gradients(optimizer, state, jax.tree.map(jnp.asarray, grad), jnp.bool_(True))
        w.grad, norm.grad = torch.tensor(grad["w"]), torch.tensor(grad["norm"])
        expected_norm = torch.nn.utils.clip_grad_norm_([w, norm], 1.5)
        reference.step()
        np.testing.assert_allclose(metrics["actor/grad_norm"], expected_norm.item(), rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], w.detach().numpy(), rtol=2e-5)
    np.testing.assert_allclose(state.params["norm"], norm.detach().numpy(), rtol=2e-5)


@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"fsdp": 4}, {"fsdp": 2, "tensor": 4}, {"expert": 8}])
def test_the_global_norm_counts_each_parameter_once_on_every_mesh(sizes):
    mesh = make_mesh(sizes)
    sharded = np.full(8, 3 / 8**0.5, np.float32)  # norm 3
    replicated = np.full(4, 2.0, np.float32)  # norm 4
    cut = NamedSharding(mesh, PartitionSpec(("fsdp", "expert", "tensor")))
    whole = NamedSharding(mesh, PartitionSpec())
    grads = {"sharded": jax.device_put(sharded, cut), "replicated": jax.device_put(replicated, whole)}
    clipped, norm = jax.jit(clip, static_argnums=1)(grads, 1.0)
    np.testing.assert_allclose(norm, 5.0, rtol=1e-6)
    np.testing.assert_allclose(clipped["sharded"], 0.2 * sharded, rtol=1e-6)
    np.testing.assert_allclose(clipped["replicated"], 0.2 * replicated, rtol=1e-6)
    unclipped, norm = clip(grads, None)
    np.testing.assert_allclose(norm, 5.0, rtol=1e-6)
    np.testing.assert_array_equal(unclipped["sharded"], sharded)


@pytest.mark.parametrize(("bad", "signal", "skipped"), [(np.nan, True, 1.0), (np.inf, True, 1.0), (0.5, False, 0.0)])
def test_without_finite_norm_or_signal_only_the_step_moves(bad, signal, skipped):
    params = {"w": np.ones((2, 2), np.float32)}
    optimizer = make_optimizer(config.Optimizer(learning_rate=0.1, weight_decay=0.1), steps=5)
    state = _single_device_state(params, {"w": (None, None)}, optimizer)
    grads = {"w": jnp.full((2, 2), bad)}
    after, metrics = apply_gradients(optimizer, state, grads, jnp.bool_(signal))
    assert float(metrics["actor/skipped_update"]) == skipped
    assert int(after.step) == 1
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, state.opt_state))


def test_moments_are_float32_and_sharded_like_their_parameter():
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    params = {"q": jnp.ones((2, 8, 4, 2), jnp.bfloat16), "norm": jnp.ones(8, jnp.bfloat16)}
    axes = {"q": ("layers", "embed", "heads", "head_dim"), "norm": (None,)}
    optimizer = make_optimizer(config.Optimizer(weight_decay=0.1), steps=1)
    shardings = state_shardings(params, axes, optimizer, mesh)
    state = init_state(params, optimizer, shardings)
    assert isinstance(state, TrainState)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 4]
    assert [(m.dtype, m.sharding.spec) for m in moments] == [(jnp.float32, PartitionSpec(None, "fsdp", "tensor"))] * 2
    assert state.params["q"].sharding.spec == PartitionSpec(None, "fsdp", "tensor")
