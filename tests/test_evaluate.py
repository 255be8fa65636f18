"""Accuracy of a policy: the best of k, and the command that measures it."""

import itertools
import json

import numpy as np
import pytest

from jaxrl_post import recipes
from jaxrl_post.loops.evaluation import best_of, sampled_metrics
from jaxrl_post.loops.online import run
from launch.__main__ import main

TINY = "configs/tiny/grpo.yaml"
SMALL = ["rollout.samples_per_prompt=4", "rollout.max_new_tokens=4", "evaluation.max_prompts=3", "steps=1"]


@pytest.mark.parametrize("rewards", [[0, 1, 0, 0, 1], [0.5, -1, 2, 2, 0.25], [1.0]])
def test_the_best_of_k_is_the_mean_over_all_subsets(rewards):
    for k in range(1, len(rewards) + 1):
        every = [max(chosen) for chosen in itertools.combinations(rewards, k)]
        assert best_of(np.array(rewards, float), k) == pytest.approx(np.mean(every))


def test_pass_at_k_by_hand():
    """Two of five right: 1 - C(3, 2) / C(5, 2) = 0.7."""
    assert best_of(np.array([0.0, 1, 0, 0, 1]), 2) == pytest.approx(0.7)


def test_metrics_hold_powers_of_two_up_to_the_number_of_samples():
    metrics = sampled_metrics(np.array([[1.0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]))
    assert metrics == pytest.approx(
        {"mean@6": 1 / 12, "best@1/mean": 1 / 12, "best@2/mean": 1 / 6, "best@4/mean": 1 / 3}
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    run(recipes.load(TINY, [*SMALL, f"run_dir={folder}", "checkpoint.every=1"]))
    return folder


def test_a_run_is_evaluated_with_its_newest_weights(run_dir, capsys):
    """The training run's own held-out number at its last step is the same greedy accuracy."""
    assert main(["evaluate", str(run_dir), "--samples", "4", "--json"]) == 0
    out, err = capsys.readouterr()
    metrics = json.loads(out)
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    name = next(key for key in last if key.startswith("val-core/"))
    assert metrics[name] == last[name]
    assert [key.rpartition("acc/")[2] for key in metrics] == [
        "mean@1", "mean@4", "best@1/mean", "best@2/mean", "best@4/mean",
    ]  # fmt: skip
    assert f"{run_dir}, step 1: 3 held-out prompts" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--step", "7"), "--step 7: {run} has no step 7; its checkpoints are of 1"),
        (("--step", "best"), "--step best: {run} keeps no best step (checkpoint.keep_best); its checkpoints are of 1"),
        (("--step", "last"), "argument --step: 'last' is neither a step nor best"),
    ],
)
def test_a_step_that_is_not_there_is_refused(run_dir, words, said, capsys, tmp_path):
    for command in (("evaluate",), ("export", "--to", str(tmp_path / "out")), ("sample", "--prompt", "x")):
        assert main([command[0], str(run_dir), *command[1:], *words]) == 2
        assert said.format(run=run_dir) in capsys.readouterr().err
    assert main(["evaluate", TINY, "--step", "1"]) == 2
    assert "--step 1 is one of a run's checkpoints: give its RUN_DIR, or --weights" in capsys.readouterr().err


def test_weights_of_another_run_serve_a_recipe(run_dir, capsys):
    words = ["evaluate", TINY, *SMALL[1:], "--weights", str(run_dir), "--samples", "2", "--train"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "best@2/mean" in out
    assert "3 training prompts" in err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["configs/tiny/sft.yaml"], "offline recipe (algorithm.kind=sft) and has no task"),
        ([TINY, "--weights", "tests"], "tests is not the folder of a run"),
        ([TINY, "--samples", "0"], "samples_per_prompt"),
        (["tests"], "tests/config.yaml"),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_one_line(words, why, capsys):
    assert main(["evaluate", *words]) == 2
    _, err = capsys.readouterr()
    assert why in err.splitlines()[-1]
