"""Held-out evaluation: exact means however the examples are split, and examples that training never sees."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_post import recipes
from jaxrl_post.data.preferences import hold_out
from jaxrl_post.loops.network import decoder_params
from jaxrl_post.loops.offline import run
from jaxrl_post.loops.offline_job import build
from jaxrl_post.loops.offline_learner import OfflineLearner
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.observe.progress import Phases
from jaxrl_post.types_offline import Answer, Example

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny"
ONE_DEVICE = ["mesh.fsdp=1", "mesh.allow_unused_devices=true", "model.random.layers=1"]
NAMES = {"rewards/accuracies": "val-core/accuracy", "rewards/margins": "val-core/margin", "loss": "val-core/loss"}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def policy(job, seed):
    """Weights drawn wider than a fresh model's, so that log-ratios are far from 0."""
    drawn = decoder_params(None, job.network.model, seed, job.network.shardings())
    return jax.tree.map(lambda p: p * 4, drawn)


@functools.lru_cache
def learner(kind, examples_per_step, budget):
    """A learner of a tiny recipe, its reference drawn by seed 1."""
    options = [f"data.examples_per_step={examples_per_step}", f"training.tokens_per_microbatch={budget}"]
    job = build(recipes.load(TINY / f"{kind}.yaml", [*ONE_DEVICE, *options, "optimizer.learning_rate=0"]))
    made = OfflineLearner(job)
    if made.needs_reference:
        made.keep_reference(policy(job, 1))
    return job, made


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
@pytest.mark.slow
def test_an_evaluation_is_the_update_s_loss_whatever_its_split(kind):
    """All 16 examples: one update's own metrics, one evaluation of 16, and one of parts of 3 in rows of their own."""
    job, whole = learner(kind, 16, 4096)
    params = policy(job, 2)
    at_once = whole.evaluate(params, job.examples, Phases())
    in_parts = learner(kind, 3, 160)[1].evaluate(params, job.examples, Phases())
    _, trained = whole.learn(whole.start(params), job.examples, Phases())
    assert at_once.keys() == in_parts.keys()
    for name, value in at_once.items():
        np.testing.assert_allclose(in_parts[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    held = {NAMES.get(name, f"val-aux/{name}"): value for name, value in trained.items()}
    for name, value in at_once.items():
        np.testing.assert_allclose(held[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    if kind != "sft":
        assert abs(at_once["val-core/loss"] - {"dpo": np.log(2), "kto": 0.5}[kind]) > 0.01


def test_answers_of_one_label_have_no_means_of_the_other():
    job, made = learner("kto", 16, 4096)
    good = [example for example in job.examples if example.desirable]
    assert set(made.evaluate(policy(job, 2), good, Phases())) == {"val-core/loss"}


def drawn(prompt, answer):
    return Example((prompt,), (Answer((answer,), (True,)),))


def test_prompts_are_held_out_whole_by_seed():
    examples = [drawn(i % 10, i) for i in range(30)]
    kept, held = hold_out(examples, 0.2, seed=0)
    assert (len(kept), len(held)) == (24, 6)
    assert not {e.prompt_ids for e in kept} & {e.prompt_ids for e in held}
    assert sorted(kept + held, key=examples.index) == examples
    assert [examples.index(e) for e in kept] == sorted(examples.index(e) for e in kept)
    assert hold_out(examples, 0.2, seed=0) == (kept, held)
    assert len({tuple(e.prompt_ids for e in hold_out(examples, 0.2, seed=s)[1]) for s in range(5)}) > 1
    with pytest.raises(ValueError, match=r"held_out_fraction=0\.01 of 10 distinct prompts is 0.*data\.held_out_path"):
        hold_out(examples, 0.01, seed=0)


def test_a_run_evaluates_before_between_and_after(tmp_path, capsys):
    options = [*ONE_DEVICE, f"run_dir={tmp_path}", "steps=3", "evaluation.every=2"]
    run(recipes.load(TINY / "dpo.yaml", options))
    shown = capsys.readouterr().out
    assert "8 examples a step of 12 in" in shown
    assert "4 held out" in shown
    assert f"curve: {tmp_path / 'curve.png'}" in shown
    assert (tmp_path / "curve.png").stat().st_size > 0
    losses = {r["step"]: r["val-core/loss"] for r in read_metrics(tmp_path / "metrics.jsonl") if "val-core/loss" in r}
    assert list(losses) == [0, 2, 3]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert losses[3] < losses[2] < losses[0]


def test_a_held_out_share_is_that_of_two_files(tmp_path):
    by_share = build(recipes.load(TINY / "dpo.yaml", ONE_DEVICE))
    assert (len(by_share.examples), len(by_share.held_out)) == (12, 4)
    whole = build(recipes.load(TINY / "dpo.yaml", [*ONE_DEVICE, "data.held_out_fraction=0"])).examples
    lines = (TINY / "data" / "preferences.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, side in (("train", by_share.examples), ("held_out", by_share.held_out)):
        kept = [line for line, example in zip(lines, whole, strict=True) if example in side]
        (tmp_path / name).write_text("".join(kept), encoding="utf-8")
    files = [f"data.path={tmp_path / 'train'}", f"data.held_out_path={tmp_path / 'held_out'}"]
    options = [*ONE_DEVICE, *files, "data.held_out_fraction=0", "evaluation.max_examples=3"]
    by_file = build(recipes.load(TINY / "dpo.yaml", options))
    assert (by_file.examples, by_file.held_out) == (by_share.examples, by_share.held_out[:3])
    assert build(recipes.load(TINY / "dpo.yaml", [*ONE_DEVICE, "evaluation.enabled=false"])).held_out == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.held_out_path=x"], r"held_out_path='x' and held_out_fraction=0\.25 both"),
        (["data.held_out_fraction=0", "evaluation.every=2"], r"evaluation\.every=2 finds nothing held out"),
        (["data.held_out_fraction=1"], r"held_out_fraction.*less than 1"),
    ],
)
def test_what_is_held_out_is_said_once(overrides, message):
    with pytest.raises(recipes.RecipeError, match=message):
        recipes.load(TINY / "dpo.yaml", overrides)


def test_a_missing_held_out_file_is_named():
    overrides = ["data.held_out_fraction=0", "data.held_out_path=nowhere"]
    with pytest.raises(ValueError, match=r"data\.held_out_path='nowhere' does not exist"):
        build(recipes.load(TINY / "dpo.yaml", overrides))
