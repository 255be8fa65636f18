"""Rollout and GRPO update on factorizations of eight devices: samples, loss, gradient norm and parameters of one."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from jaxrl_post.config import GRPO
from jaxrl_post.config_model import Mixture
from jaxrl_post.models.config import Experts, ModelConfig
from jaxrl_post.models.decoder import Decoder, abstract, split
from jaxrl_post.rollout.sampler import SampleOptions, Sampler
from jaxrl_post.training.loss import policy_loss
from jaxrl_post.training.optimizer import Optimizer
from jaxrl_post.training.packing import PackShape, pack
from jaxrl_post.training.state import init_state, state_shardings
from jaxrl_post.training.update import batch_shardings, make_update
from jaxrl_post.types import Trajectory
from sharding import ROLLOUT, make_mesh, place, tree_shardings

SIZES = {"heads": 16, "kv_heads": 8, "head_dim": 4, "initializer_range": 0.3}  # all divide by 8
DENSE = ModelConfig("qwen2", 96, 32, 64, layers=2, **SIZES)
EXPERTS = ModelConfig("qwen3_moe", 96, 32, 64, layers=2, **SIZES, moe=Experts(8, 2, 16))
SMALL = ModelConfig("qwen2", 96, 32, 64, layers=1, **SIZES)
PROMPTS = [[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7], [60, 61]]
SAMPLES, NEW_TOKENS, STOPS = 4, 8, (7, *range(84, 96))
DENSE_MESHES = [
    "data=8", "fsdp=8", "tensor=8", "sequence=8", "sequence=8 ulysses", "data=2 fsdp=4", "data=2 fsdp=2 tensor=2",
    "fsdp=2 sequence=2 tensor=2 ulysses", "data=2 sequence=4", "sequence=4 tensor=2",
]  # fmt: skip
EXPERT_MESHES = [
    "expert=8", "data=2 expert=4", "fsdp=2 expert=2 tensor=2", "expert=2 sequence=2 tensor=2", "fsdp=4 sequence=2",
    "data=2 expert=2 sequence=2 ulysses", "expert=8 all_to_all", "data=2 expert=4 all_to_all",
    "fsdp=2 expert=2 tensor=2 all_to_all", "expert=2 sequence=2 tensor=2 all_to_all",
]  # fmt: skip
SLOW_CASES = [(DENSE, mesh) for mesh in DENSE_MESHES] + [(EXPERTS, mesh) for mesh in EXPERT_MESHES]


@functools.cache
def weights(config):
    return jax.device_get(split(Decoder(config, jax.random.key(0)))[1])


def read(text, config):
    """`data=2 sequence=4 ulysses` to sizes, and the model with what else is asked for."""
    words = text.split()
    sizes = {name: int(size) for name, size in (word.split("=") for word in words if "=" in word)}
    if "all_to_all" in words:
        config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, dispatch="padded"))
    return sizes, dataclasses.replace(config, sequence_attention="ulysses" if "ulysses" in words else "ring")


def rollout(config, mesh):
    graphdef, shapes, axes = abstract(config)
    options = SampleOptions(samples_per_prompt=SAMPLES, max_new_tokens=NEW_TOKENS)
    params = place(weights(config), tree_shardings(axes, shapes, ROLLOUT, mesh))
    return (
        Sampler(graphdef, config, mesh, STOPS).generate(params, PROMPTS, options, seed=0, step=1, width=8).completions
    )


def graded(completions):
    """Trajectories with GRPO's advantages for the share of even ids."""
    reward = np.array([np.mean(c.ids % 2 == 0) for c in completions]).reshape(-1, SAMPLES)
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
    return [
        Trajectory(c.prompt, tuple(PROMPTS[c.prompt]), c.ids, c.logp, float(a), True)
        for c, a in zip(completions, advantage.ravel(), strict=True)
    ]


def update(config, mesh, samples):
    """Parameters after a step of SGD, metrics, log-probs of the targets."""
    graphdef, params, axes = abstract(config)
    optimizer = Optimizer(optax.identity(), lambda _: jax.numpy.float32(1.0), None)
    shardings = state_shardings(params, axes, optimizer, mesh)
    shape = PackShape(rows=8, length=32, targets=32, micro_batches=2, batch_shards=8)
    rows = batch_shardings(shape, mesh)
    run = make_update(
        graphdef, optimizer, policy_loss(GRPO(), num_sequences=1), temperature=1.0, chunk=16, shardings=shardings,
        batch_shardings=rows, mixture=Mixture(aux_loss_coef=0.01, z_loss_coef=0.01) if config.moe else None,
    )  # fmt: skip
    batch, n_micro, _ = pack(samples, shape, aggregation="token-mean")
    state, metrics, logp = run(init_state(weights(config), optimizer, shardings), place(batch, rows), np.int32(n_micro))
    return jax.device_get((state.params, metrics, logp))


@functools.cache
def alone(config):
    one = make_mesh({}, jax.devices()[:1])
    completions = rollout(config, one)
    return completions, *update(config, one, graded(completions))


def differences(completions, params, metrics, logp, expected):
    """(what, its greatest difference, the greatest allowed)."""
    of_one, params_of_one, metrics_of_one, logp_of_one, before = expected
    pairs = list(zip(completions, of_one, strict=True))
    yield "sampled ids that differ", sum(not np.array_equal(a.ids, b.ids) for a, b in pairs), 0
    yield "log-probs of samples", max(np.abs(a.logp - b.logp).max() for a, b in pairs), 2e-5
    yield "log-probs of targets", np.abs(logp - logp_of_one).max(), 2e-5
    for name, value in metrics_of_one.items():
        yield name, abs(metrics[name] - value), 1e-5 + 1e-4 * abs(value)
    moved = jax.tree.map(lambda old, new: np.abs(new - old).max(), before, params_of_one)
    limit = 1e-5 * max(1, *jax.tree.leaves(moved))
    for (path, ours), one in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(params_of_one), strict=True):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), np.abs(ours - one).max(), limit


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(SMALL, "fsdp=2 sequence=2 tensor=2 ulysses", id="small fsdp=2 sequence=2 tensor=2 ulysses"),
        *(
            pytest.param(config, name, id=f"{'experts' if config.moe else 'dense'} {name}", marks=pytest.mark.slow)
            for config, name in SLOW_CASES
        ),
    ],
)
def test_a_step_on_any_mesh_is_that_of_one_device(config, name):
    sizes, over = read(name, config)
    assert np.prod(list(sizes.values())) == 8
    expected = (*alone(config), weights(config))
    mesh = make_mesh(sizes)
    completions = rollout(over, mesh)
    params, metrics, logp = update(over, mesh, graded(completions))
    rows = [
        (what, float(gap), float(limit))
        for what, gap, limit in differences(completions, params, metrics, logp, expected)
    ]
    table = "\n".join(
        f"{'!' if not gap <= limit else ' '} {what:40} {gap:10.2e} {limit:10.2e}" for what, gap, limit in rows
    )
    assert all(gap <= limit for _, gap, limit in rows), f"\n  {'on ' + name:40} difference      limit\n{table}"
    assert expected[2]["actor/grad_norm"] > 1e-2
