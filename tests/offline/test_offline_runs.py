"""Whole runs of the tiny recipes: exact resume, and a reward model that can be asked for scores afterwards."""

import dataclasses
import json
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from models.tiny_models import BASE, draw
from safetensors.numpy import load_file, save_file

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.config import Config
from jaxrl_post.config_offline import OFFLINE_KINDS, OfflineConfig
from jaxrl_post.data.preferences import load_examples
from jaxrl_post.data.tokenizer import ByteTokenizer
from jaxrl_post.loops.offline import run
from jaxrl_post.models.decoder import abstract
from jaxrl_post.models.huggingface_export import save_params
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.recipes import RecipeError
from jaxrl_post.rewards.model import RewardModel
from launch.byte_tokenizer import write_byte_tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny"
ONE_DEVICE = ["mesh.fsdp=1", "mesh.allow_unused_devices=true", "model.random.layers=1"]
TIMED = ("timing_s/", "perf/", "compile/")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def train(recipe, run_dir, *overrides):
    run(recipes.load(TINY / f"{recipe}.yaml", [f"run_dir={run_dir}", *ONE_DEVICE, *overrides]))
    return read_metrics(Path(run_dir) / "metrics.jsonl")


def numbers(record):
    return {k: v for k, v in record.items() if not k.startswith(TIMED)}


def saved(run_dir, step):
    folder = Checkpointer(Path(run_dir) / "checkpoints", 2)
    with warnings.catch_warnings(action="ignore"):  # that it is read without a layout
        flat = folder._manager.restore(step)["arrays"]
    folder.close()
    return {name: np.asarray(x) for name, x in flat.items()}


def test_every_kind_has_a_recipe_that_loads():
    loaded = {recipes.load(path).algorithm.kind for path in sorted(TINY.glob("*.yaml"))}
    assert set(OFFLINE_KINDS) <= loaded
    assert isinstance(recipes.load(TINY / "dpo.yaml"), OfflineConfig)
    assert isinstance(recipes.load(TINY / "grpo.yaml"), Config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.kind=dop", r"kind dop is not one of sft, .*dpo.*Did you mean dpo"),
        ("algorithm.label_smoothing=0.5", r"algorithm\.label_smoothing.*less than 0\.5"),
        ("algorithm.losses={dpo: 1, kto: 1}", r"losses"),
        ("rollout.top_k=3", r"rollout: no such key at the top level"),
        ("algorithm={kind: dpo, label_smoothing: 0.1, losses: {hinge: 1}}", r"only read by the loss dpo"),
        ("data.prompts_per_step=3", r"Did you mean data\.examples_per_step"),
        ("beta=0.2", r"Did you mean algorithm\.beta"),
    ],
)
def test_offline_recipes_are_checked_by_their_own_schema(override, message):
    with pytest.raises(RecipeError, match=message):
        recipes.load(TINY / "dpo.yaml", [override])


@pytest.mark.parametrize("algorithm", ["", "algorithm: {}\n", "algorithm: {beta: 0.2}\n"])
def test_rows_without_a_kind_are_not_taken_for_prompts_of_an_online_run(tmp_path, algorithm):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {random: {}}\ndata: {path: rows.jsonl}\n" + algorithm, encoding="utf-8")
    with pytest.raises(RecipeError, match=r"algorithm\.kind is required, .*data\.path.*data\.task.*one of sft, .*dpo"):
        recipes.load(recipe)


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(tmp_path):
    shape = dataclasses.replace(BASE, vocab_size=264, tie_embeddings=True, max_positions=256)
    save_params(tmp_path / "model", draw(shape), shape)
    write_byte_tokenizer(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    lost = sorted(tensors)[3]
    save_file({name: x for name, x in tensors.items() if name != lost}, file)
    options = [f"run_dir={tmp_path / 'run'}", "model.random=null", f"model.path={tmp_path / 'model'}"]
    with pytest.raises(ValueError, match=lost):
        run(recipes.load(TINY / "dpo.yaml", [*ONE_DEVICE[:2], *options]))
    assert not (tmp_path / "run").exists()


def test_a_stopped_run_continues_bit_for_bit(tmp_path):
    """A mixture of DPO, BCO and NLL: reference, running shift, optimizer and data position all go on."""
    whole = train("mpo", tmp_path / "whole", "steps=4", "optimizer.warmup_steps=3")
    train("mpo", tmp_path / "parts", "steps=2", "optimizer.warmup_steps=3")
    again = train("mpo", tmp_path / "parts", "steps=4", "optimizer.warmup_steps=3")
    assert [numbers(r) for r in again] == [numbers(r) for r in whole]
    assert len({r["rewards/shift"] for r in whole}) == 4
    one, other = (saved(tmp_path / name, 4) for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.slow
def test_a_reward_model_learns_the_pairs_and_scores_them_afterwards(tmp_path):
    records = train("reward_model", tmp_path, "steps=24", "optimizer.learning_rate=3e-3")
    assert records[-1]["loss"] < 0.3 < records[0]["loss"]
    reward = RewardModel(tmp_path, max_tokens=96, tokens_per_batch=192)
    config = recipes.load(TINY / "reward_model.yaml")
    examples = load_examples(config, ByteTokenizer())[0]
    ask = lambda k: reward([e.prompt_ids for e in examples], [e.answers[k].ids for e in examples])
    chosen, rejected = ask(0), ask(1)
    assert (chosen > rejected).mean() > 0.8
    assert chosen.shape == (len(examples),)
    for i in (0, 7):
        np.testing.assert_allclose(chosen[i], scored_alone(tmp_path, reward, examples[i], 0), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"answer 0: 3 prompt and 0 answer tokens"):
        reward([(1, 2, 3)], [()])
    assert reward([], []).shape == (0,)


def scored_alone(run_dir, reward, example, k):
    """The head's dot product with the last hidden state of an unpacked row, from the checkpoint's arrays."""
    flat = saved(run_dir, 24)
    graphdef, shapes, _ = abstract(reward._network.model)
    named = jax.tree_util.tree_map_with_path(
        lambda path, _: flat["params/decoder/" + jax.tree_util.keystr(path, simple=True, separator="/")], shapes
    )
    ids = np.zeros((1, 96), np.int32)
    n = len(example.prompt_ids) + len(example.answers[k].ids)
    ids[0, :n] = (*example.prompt_ids, *example.answers[k].ids)
    live = (np.arange(96) < n).astype(np.int32)[None]
    x = jax.jit(lambda p: nnx.merge(graphdef, p).hidden(ids, np.arange(96, dtype=np.int32)[None], live, 0 * live))(
        named
    )
    return np.asarray(x)[0, n - 1].astype(np.float64) @ flat["params/head/weight"].astype(np.float64)


def test_only_runs_of_a_reward_model_give_scores(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.yaml"):
        RewardModel(tmp_path, max_tokens=8)
    (tmp_path / "config.yaml").write_text(recipes.dump(recipes.load(TINY / "dpo.yaml")), encoding="utf-8")
    with pytest.raises(ValueError, match=r"algorithm\.kind=dpo, which has no scores"):
        RewardModel(tmp_path, max_tokens=8)
    text = recipes.dump(recipes.load(TINY / "reward_model.yaml"))
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"no checkpoints yet"):
        RewardModel(tmp_path, max_tokens=8)


def test_dropped_examples_are_counted_and_finished_runs_left_alone(tmp_path, capsys):
    rows = [{"prompt": "x" * 200, "completion": "y", "label": True}]
    rows += [{"prompt": "a", "completion": c, "label": c == "b"} for c in "bcbc"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ["steps=1", f"data.path={path}", "data.examples_per_step=2", "data.max_tokens=40", "data.shuffle=false"]
    (record,) = train("kto", tmp_path / "run", *options)
    assert "1 dropped and 0 cut" in capsys.readouterr().out
    assert record["loss"] == 0.5  # policy = reference, so both sigmoids are 1/2
    assert (record["kl"], record["rewards/margins"]) == (0, 0)
    assert train("kto", tmp_path / "run", *options) == [record]
    assert "already" in capsys.readouterr().out
