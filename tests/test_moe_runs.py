"""Whole runs of the recipe with experts: on policy with replayed routing, and alike with experts cut over devices."""

from pathlib import Path

import numpy as np
import pytest
from whole_runs import numbers, rollouts

from jaxrl_post import recipes
from jaxrl_post.loops.online import run
from jaxrl_post.observe.metrics import read_metrics

RECIPE = Path(__file__).parent.parent / "configs" / "tiny" / "moe_grpo.yaml"
pytestmark = pytest.mark.slow


def train(run_dir, *mesh):
    run(recipes.load(RECIPE, [f"run_dir={run_dir}", "steps=2", "evaluation.enabled=false", "mesh.fsdp=1", *mesh]))
    return read_metrics(run_dir / "metrics.jsonl")


@pytest.mark.parametrize("dispatch", ["gather", "all_to_all"])
def test_experts_cut_over_four_devices_sample_and_learn_like_one(tmp_path, dispatch):
    one = train(tmp_path / "one", "mesh.allow_unused_devices=true")
    cut = train(tmp_path / "cut", "mesh.expert=4", "mesh.tensor=2", f"model.moe.dispatch={dispatch}")
    for step in (1, 2):
        ids = [[sample["ids"] for sample in rollouts(tmp_path / name, step)] for name in ("one", "cut")]
        assert ids[0] == ids[1]
    for record, other in zip(one, cut, strict=True):
        assert record["rollout_corr/logp_abs_diff_max"] < 1e-4
        assert record["actor/pg_clipfrac"] == 0
        assert record["rollout_corr/routing_diff_fraction"] == 0
        assert record["actor/moe/aux_loss"] > 1
        for name, value in numbers(record).items():
            if name.startswith("global_seqlen/"):  # of data ranks, of which there are as many as parts of the experts
                continue
            np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
