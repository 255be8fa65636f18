"""What `mesh.fsdp` cuts by `mesh.zero`: where arrays lie, and that it changes no number."""

import collections
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from whole_runs import numbers, rollouts

from jaxrl_post import recipes
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.network import rollout_params
from jaxrl_post.loops.online import run
from jaxrl_post.loops.planning import stand_in_job
from jaxrl_post.models.config import Experts
from jaxrl_post.models.moe import AXES, mixture, shapes
from jaxrl_post.models.placement import Placement
from jaxrl_post.observe.metrics import read_metrics
from sharding.mesh import make_mesh
from sharding.placement import place, tree_shardings
from sharding.report import Program
from sharding.rules import ROLLOUT, TRAIN

RECIPE = Path(__file__).parent.parent / "configs" / "tiny" / "grpo.yaml"
MESH = ["mesh.fsdp=4", "mesh.tensor=2"]


def learner_of(zero, *overrides, recipe=RECIPE, mesh=MESH):
    return Learner(stand_in_job(recipes.load(recipe, [*mesh, f"mesh.zero={zero}", *overrides]), jax.devices()))


@pytest.mark.parametrize(("zero", "whole"), [(1, True), (2, True), (3, False)])
def test_weights_are_whole_or_cut_and_moments_always_cut(zero, whole):
    job = stand_in_job(recipes.load(RECIPE, [*MESH, f"mesh.zero={zero}"]), jax.devices())
    learner, network = Learner(job), job.network
    state = learner.trained.abstract_state()
    cut = tree_shardings(network.axes, network.abstract_params, TRAIN, network.mesh)
    of = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert of(state.opt_state.mu) == of(state.opt_state.nu) == cut
    assert (of(state.params) == cut) is not whole
    assert (of(learner.trained.abstract_gradients()) == cut) is (zero > 1)
    assert {x.dtype for x in jax.tree.leaves(learner.trained.abstract_gradients())} == {np.dtype(np.float32)}
    over_fsdp = ["fsdp" in str(sharding.spec) for sharding in jax.tree.leaves(of(state.params))]
    assert any(over_fsdp) is not whole
    params = place(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), network.abstract_params), of(state.params))
    assert (rollout_params(network, params) is params) is whole  # the sampler reads whole weights as they lie


@pytest.mark.slow
def test_stage_1_sums_whole_gradients_and_gathers_weights_once_an_update():
    learner = learner_of(1, "model.scan_layers=true")
    text, mesh = learner.traced_update().lower().compile().as_text(), learner.trained.shardings.step.mesh
    sent = collections.Counter()
    for c in Program(text).collectives(mesh):
        sent[c.kind] += c.bytes if "fsdp" in c.axes else 0
    weights = sum(4 * x.size for x in jax.tree.leaves(learner.trained.abstract_gradients()))
    assert {kind for kind, size in sent.items() if size} == {"all-reduce", "all-gather"}
    assert weights / 2 <= sent["all-reduce"] < 1.1 * weights  # tensor=2 cuts most of them
    assert 0.9 * weights / 2 <= sent["all-gather"] <= weights / 2


@pytest.mark.slow
def test_all_stages_sample_and_learn_alike(tmp_path):
    stages = (1, 2, 3)
    for zero in stages:
        overrides = [f"run_dir={tmp_path / str(zero)}", "steps=2", "evaluation.enabled=false", f"mesh.zero={zero}"]
        run(recipes.load(RECIPE, [*MESH, *overrides]))
    first, *others = (read_metrics(tmp_path / str(zero) / "metrics.jsonl") for zero in stages)
    for step in (1, 2):
        ids = [[sample["ids"] for sample in rollouts(tmp_path / str(zero), step)] for zero in stages]
        assert ids[0] == ids[1] == ids[2]
    for records in others:
        for record, other in zip(first, records, strict=True):
            for name, value in numbers(record).items():
                np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=2e-5, err_msg=name)


def gathers_over_fsdp(whole):
    """In the compiled gradient of a mixture whose weights lie so."""
    moe, mesh = Experts(4, 2, 16, whole=whole), make_mesh({"fsdp": 4, "expert": 2})
    weights = {name: jax.ShapeDtypeStruct(s, np.float32) for name, s in shapes(moe, 16).items()}
    shardings = tree_shardings({name: AXES[name] for name in weights}, weights, ROLLOUT if whole else TRAIN, mesh)
    rows = NamedSharding(mesh, PartitionSpec(("fsdp", "expert")))
    layer = mixture(moe, Placement(rows))
    gradient = jax.grad(lambda w, h_BTD: layer(w, h_BTD, None)[0].sum())
    compute = jax.jit(gradient, in_shardings=(shardings, rows), out_shardings=shardings)
    compiled = compute.lower(weights, jax.ShapeDtypeStruct((8, 4, 16), np.float32)).compile()
    sent = Program(compiled.as_text()).collectives(mesh)
    return [c.count for c in sent if (c.kind, c.axes) == ("all-gather", ("fsdp",))]


def test_whole_weights_of_experts_are_not_gathered():
    assert gathers_over_fsdp(whole=True) == []
    assert gathers_over_fsdp(whole=False) != []
