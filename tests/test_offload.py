"""Moments and activations in the host's memory: where they lie, and that it changes no number."""

import contextlib
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from whole_runs import numbers, rollouts

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.config import Optimizer
from jaxrl_post.loops.online import run
from jaxrl_post.loops.planning import Planner
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.training.optimizer import make_optimizer
from jaxrl_post.training.state import TrainState, init_state, restorable_state, state_shardings
from jaxrl_post.training.update import apply_gradients
from launch.plan import describe
from sharding import memory
from sharding.mesh import make_mesh
from sharding.placement import place
from sharding.targets import parse_target

RECIPE = "configs/tiny/offload.yaml"
AXES = {
    "embed": ("vocab", "embed"),
    "norm": (None,),
    "layers": {"up": ("layers", "embed", "mlp"), "q_norm": ("layers", "head_dim")},
}
SHAPES = {"embed": (6, 8), "norm": (8,), "layers": {"up": (3, 8, 4), "q_norm": (3, 2)}}
OPTIMIZER = make_optimizer(Optimizer(learning_rate=0.1, weight_decay=0.3, max_grad_norm=2.0), steps=4)


def draw(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.standard_normal(s, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))


@functools.cache
def updates(offload):
    """States after each of four updates, of which the third has a gradient that is not finite; and the shardings."""
    shardings = state_shardings(draw(0), AXES, OPTIMIZER, make_mesh({"fsdp": 4, "tensor": 2}), offload=offload)
    step = jax.jit(
        lambda state, grads: apply_gradients(OPTIMIZER, state, grads, jnp.bool_(True)),
        in_shardings=(shardings.state, shardings.gradients),
        out_shardings=(shardings.results, None),
    )
    state, states = init_state(draw(0), OPTIMIZER, shardings), []
    for seed in (1, 2, 3, 4):
        grads = draw(seed)
        grads["norm"][0] = np.nan if seed == 3 else grads["norm"][0]
        state, _ = step(state, place(grads, shardings.gradients))
        states.append(state)
    return states, shardings


def test_updates_on_offloaded_moments_are_the_same_bit_for_bit():
    for plain, offloaded in zip(updates(False)[0], updates(True)[0], strict=True):
        jax.tree.map(np.testing.assert_array_equal, offloaded, plain)
    before, skipped, last = updates(True)[0][1:]
    jax.tree.map(np.testing.assert_array_equal, skipped[:2], before[:2])
    assert (last.params["layers"]["up"] != skipped.params["layers"]["up"]).all()
    assert [int(state.opt_state[0].count) for state in (before, skipped, last)] == [2, 2, 3]


def test_moments_lie_in_the_hosts_memory_cut_as_before_and_come_back_there(tmp_path):
    states, shardings = updates(True)
    plain = updates(False)[1]
    kinds = lambda tree: {x.ndim > 0: x.sharding.memory_kind for x in jax.tree.leaves(tree)}
    assert kinds(states[-1].opt_state) == {True: "pinned_host", False: "device"}
    assert "pinned_host" not in kinds(states[-1].params).values()
    specs = lambda shardings: jax.tree.map(lambda s: s.spec, shardings.opt_state)
    assert specs(shardings) == specs(plain)
    for to, kind in ((shardings, "pinned_host"), (plain, "device")):  # a run may change its mind
        with contextlib.closing(Checkpointer(tmp_path / kind, keep_last=1)) as checkpoints:
            checkpoints.save(0, states[-1]._asdict(), {})
            checkpoints.wait()
            arrays, _ = checkpoints.restore(0, restorable_state(draw(0), OPTIMIZER, to)._asdict())
        assert kinds(TrainState(**arrays).opt_state)[True] == kind
        jax.tree.map(np.testing.assert_array_equal, TrainState(**arrays), states[-1])


def test_a_device_without_such_memory_is_refused_by_name():
    memories = [types.SimpleNamespace(kind="device")]
    device = types.SimpleNamespace(platform="metal", process_index=0, addressable_memories=lambda: memories)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    with pytest.raises(ValueError, match=r"offload=true: metal devices reach no memory of their host .*offload=false"):
        memory.check_host_memory(mesh, "optimizer.offload=true", "optimizer.offload=false")


def test_the_stand_in_for_a_gpu_that_is_not_there_is_not_taken_for_device_memory():
    mesh = make_mesh({"fsdp": 8})
    plain, planned = (kind(mesh, PartitionSpec("fsdp")) for kind in (NamedSharding, memory._PlannedHost))
    assert planned != plain
    assert plain != planned
    assert len({plain, planned}) == 2
    assert memory.of_result(planned) == plain
    shape = jax.ShapeDtypeStruct((16,), np.float32, sharding=planned)
    assert (memory.placed_bytes(shape), memory.placed_bytes(shape, on_host=True)) == (0, 8)


def plan(*overrides):
    config = recipes.load(RECIPE, ["model.scan_layers=true", *overrides])
    return Planner(config, parse_target("h200:1x2"), jax.devices()[:2]).plan()


@pytest.mark.slow
def test_a_plan_counts_the_hosts_memory_apart():
    here, there = plan("optimizer.offload=false", "model.remat=full"), plan()
    for before, after in zip(here.programs, there.programs, strict=True):
        device, on_host = ({item.name: item.bytes for item in items} for items in (after.items, after.on_host))
        optimizer = next(item.bytes for item in before.items if item.name == "optimizer")
        assert before.on_host == ()
        assert on_host["optimizer"] + device["optimizer"] == optimizer
        assert device["optimizer"] < 64  # counters
    beside = here.programs[0].peak - there.programs[0].peak  # a rollout; CPUs' compiler tells no memories apart
    assert beside == optimizer - device["optimizer"]
    assert there.programs[1].seconds["host"] == pytest.approx(on_host["optimizer"] / 64e9)
    assert "in the host's memory: optimizer" in describe(there)


@pytest.mark.slow
def test_runs_with_offload_sample_and_learn_alike_and_resume(tmp_path):
    quick = ["evaluation.enabled=false", "checkpoint.every=1"]
    kinds = {"off": ["optimizer.offload=false", "model.remat=none"], "on": [], "dots": ["model.remat=dots_offload"]}
    for name, changes in kinds.items():
        steps = (2, 3) if name == "on" else (3,)
        for n in steps:
            run(recipes.load(RECIPE, [f"run_dir={tmp_path / name}", f"steps={n}", *quick, *changes]))
    off, *others = (read_metrics(tmp_path / name / "metrics.jsonl") for name in kinds)
    for name, other in zip(("on", "dots"), others, strict=True):
        assert len(off) == len(other) == 3
        for step in (1, 2, 3):
            ids = [[sample["ids"] for sample in rollouts(tmp_path / x, step)] for x in ("off", name)]
            assert ids[0] == ids[1]
        for record, wanted in zip(other, off, strict=True):
            for key, value in numbers(wanted).items():
                np.testing.assert_allclose(record[key], value, rtol=1e-5, atol=1e-6, err_msg=key)
