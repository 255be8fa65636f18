"""What `mesh.fsdp` cuts by `mesh.zero`: where arrays lie, and that it changes no number."""

from pathlib import Path

import jax
import numpy as np
import pytest
from whole_runs import numbers, rollouts

from jaxrl_post import recipes
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.network import rollout_params
from jaxrl_post.loops.online import run
from jaxrl_post.loops.planning import stand_in_job
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.training.state import first_moments
from sharding.placement import place, tree_shardings
from sharding.rules import TRAIN

RECIPE = Path(__file__).parent.parent / "configs" / "tiny" / "grpo.yaml"
MESH = ["mesh.fsdp=4", "mesh.tensor=2"]


@pytest.mark.parametrize(("zero", "whole"), [(2, True), (3, False)])
def test_weights_are_whole_or_cut_and_moments_always_cut(zero, whole):
    job = stand_in_job(recipes.load(RECIPE, [*MESH, f"mesh.zero={zero}"]), jax.devices())
    network, state = job.network, Learner(job).abstract_state()
    cut = tree_shardings(network.axes, network.abstract_params, TRAIN, network.mesh)
    of = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert of(first_moments(state)) == cut
    assert (of(state.params) == cut) is not whole
    over_fsdp = ["fsdp" in str(sharding.spec) for sharding in jax.tree.leaves(of(state.params))]
    assert any(over_fsdp) is not whole
    params = place(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), network.abstract_params), of(state.params))
    assert (rollout_params(network, params) is params) is whole  # the sampler reads whole weights as they lie


@pytest.mark.slow
def test_both_stages_sample_and_learn_alike(tmp_path):
    for zero in (2, 3):
        overrides = [f"run_dir={tmp_path / str(zero)}", "steps=2", "evaluation.enabled=false", f"mesh.zero={zero}"]
        run(recipes.load(RECIPE, [*MESH, *overrides]))
    two, three = (read_metrics(tmp_path / str(zero) / "metrics.jsonl") for zero in (2, 3))
    for step in (1, 2):
        ids = [[sample["ids"] for sample in rollouts(tmp_path / str(zero), step)] for zero in (2, 3)]
        assert ids[0] == ids[1]
    for record, other in zip(two, three, strict=True):
        for name, value in numbers(record).items():
            np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=2e-5, err_msg=name)
