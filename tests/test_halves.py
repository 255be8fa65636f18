"""Half a run at a time: only rollouts, only updates; and the weights that both halves see."""

from pathlib import Path

import jax
import numpy as np
import pytest
from whole_runs import numbers, rollouts

from jaxrl_post import recipes
from jaxrl_post.data.tokenizer import ByteTokenizer
from jaxrl_post.loops.layouts import check_layouts
from jaxrl_post.loops.network import build_network, initial_params, rollout_params
from jaxrl_post.observe.metrics import read_metrics
from launch.__main__ import main

ROOT = Path(__file__).parent.parent
RECIPE = "configs/tiny/grpo.yaml"
SMALL = (
    "mesh.fsdp=1", "mesh.allow_unused_devices=true", "rollout.max_new_tokens=4", "data.prompts_per_step=2",
    "rollout.samples_per_prompt=4", "evaluation.enabled=false", "training.tokens_per_microbatch=256", "steps=3",
    "model.random={family: llama, layers: 1, hidden_size: 16, intermediate_size: 32}",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def launched(folder, *words):
    assert main([RECIPE, f"run_dir={folder}", *SMALL, *words]) == 0
    return read_metrics(folder / "metrics.jsonl")


def learned(record):
    return {name: x for name, x in numbers(record).items() if not name.startswith("rollout/")}


@pytest.mark.slow
def test_halves_of_a_run_do_what_the_whole_does(tmp_path):
    """Updates on dumped rollouts give the same numbers bit by bit; rollouts alone are those before any update."""
    whole = launched(tmp_path / "whole", "debug.check_layouts=true")
    again = launched(tmp_path / "again", "--rollouts", str(tmp_path / "whole"))
    assert [learned(record) for record in again] == [learned(record) for record in whole]
    assert any(record.get("actor/grad_norm", 0) > 0 for record in whole)
    assert all(rollouts(tmp_path / "again", step) == rollouts(tmp_path / "whole", step) for step in (1, 2, 3))

    alone = launched(tmp_path / "alone", "--rollout-only")
    bare = [[row | {"advantage": 0.0} for row in rollouts(tmp_path / run, 1)] for run in ("alone", "whole")]
    assert bare[0] == bare[1]
    assert alone[0]["critic/rewards/mean"] == whole[0]["critic/rewards/mean"]
    assert not (tmp_path / "alone" / "checkpoints").exists()
    assert all("actor/grad_norm" not in record for record in alone)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((RECIPE, "--rollout-only", "--rollouts", "x"), "leave nothing to do: give one of them"),
        (("configs/tiny/sft.yaml", "--rollout-only"), "--rollout-only: algorithm.kind=sft trains on files"),
        ((RECIPE, *SMALL, "--rollouts", "nowhere"), "--rollouts nowhere: there is no step_000001.jsonl"),
        (
            (RECIPE, *SMALL, "rollout.partial={}", "--rollouts", "x"),
            "--rollouts: dumped samples lack what rollout.partial",
        ),
        ((RECIPE, *SMALL, "data.curriculum={}", "--rollouts", "x"), "--rollouts: data.curriculum chooses what to"),
    ],
)
def test_modes_that_cannot_be_are_refused(words, parts, capsys, tmp_path):
    assert main([*words, f"run_dir={tmp_path}/run"]) == 2
    assert parts in capsys.readouterr().err


def test_weights_that_differ_between_layouts_are_named():
    config = recipes.load(ROOT / RECIPE, ["mesh.fsdp=4", "mesh.tensor=2", *SMALL[2:], "model.dtype=bfloat16"])
    network = build_network(config, None, ByteTokenizer())
    trained = initial_params(network, 0)
    sampled = rollout_params(network, trained)
    check_layouts(trained, sampled)
    leaves, structure = jax.tree.flatten(sampled)
    leaves[1] = jax.device_put(np.asarray(leaves[1]) * 2, leaves[1].sharding)
    with pytest.raises(ValueError, match=r"debug.check_layouts: \S+ \(.*\) differs between .* in \d+ of \d+ numbers"):
        check_layouts(trained, jax.tree.unflatten(structure, leaves))
