"""Reference log-probs kept in the run folder: the same numbers, no copy of the weights, never those of another run."""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
from models.tiny_models import BASE, draw
from safetensors.numpy import load_file, save_file
from tiny_offline import draw as draw_examples

from jaxrl_post import recipes
from jaxrl_post.loops import offline
from jaxrl_post.loops.offline_job import build
from jaxrl_post.loops.offline_reference import FILE, read_scores, reference_key, scored_examples, write_scores
from jaxrl_post.models.huggingface_export import save_params
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.training.offline_packing import example_shape, pack_examples, unpack_targets
from launch.byte_tokenizer import write_byte_tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny"
ONE_DEVICE = ["mesh.fsdp=1", "mesh.allow_unused_devices=true", "model.random.layers=1"]
TIMED = ("timing_s/", "perf/", "compile/")
BASE256 = dataclasses.replace(BASE, vocab_size=264, tie_embeddings=True, max_positions=256)
EXAMPLES = draw_examples([(3, 5), (10, 2), (1, 12), (6, 6)], seed=4)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def train(run_dir, *overrides):
    options = [f"run_dir={run_dir}", *ONE_DEVICE, "data.held_out_fraction=0.25", "evaluation.every=1", *overrides]
    offline.run(recipes.load(TINY / "mpo.yaml", options))
    records = read_metrics(Path(run_dir) / "metrics.jsonl")
    return [{name: x for name, x in record.items() if not name.startswith(TIMED)} for record in records]


def assert_same(records, others):
    for record, other in zip(records, others, strict=True):
        assert record.keys() == other.keys()
        for name, value in record.items():
            np.testing.assert_allclose(value, other[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_a_run_with_kept_scores_is_the_run_with_a_reference(tmp_path, capsys, monkeypatch):
    """A resumed one does not even load the reference."""
    whole = train(tmp_path / "whole", "steps=2")
    train(tmp_path / "kept", "steps=1", "training.cache_reference=true")
    assert "16/16 examples scored" in capsys.readouterr().out
    monkeypatch.setattr(offline, "initial_params", lambda *_: pytest.fail("the reference was loaded"))
    kept = train(tmp_path / "kept", "steps=2", "training.cache_reference=true")
    assert_same(kept, whole)
    assert "scored" not in capsys.readouterr().out


def test_scores_are_put_where_the_packing_puts_their_tokens():
    shape = example_shape([e.size for e in EXAMPLES], 2, examples_per_step=4, tokens_per_microbatch=64, row_length=32)
    known = [100 * i + np.arange(example.targets, dtype=np.float32) for i, example in enumerate(EXAMPLES)]
    batch, _, _ = pack_examples(EXAMPLES, shape, ref_logp=known)
    for made, expected in zip(unpack_targets(batch.rows.ref_logp, EXAMPLES, shape), known, strict=True):
        np.testing.assert_array_equal(made, expected)
    assert np.count_nonzero(batch.rows.ref_logp) == sum(e.targets for e in EXAMPLES) - 1
    ids = unpack_targets(batch.rows.target, EXAMPLES, shape)
    for made, example in zip(ids, EXAMPLES, strict=True):
        np.testing.assert_array_equal(made, np.concatenate([answer.ids for answer in example.answers]))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "key", "warning"),
    [
        (lambda path: None, "another", "of another model, seed, dtype or data"),
        (flip, "key", "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "key", "cannot be read"),
        (lambda path: path.write_bytes(b""), "key", "cannot be read"),
        (lambda path: save_file({"other": np.zeros(3)}, path), "key", "cannot be read"),
    ],
)
def test_scores_that_do_not_fit_are_made_anew_with_a_warning(tmp_path, caplog, harm, key, warning):
    scores = [np.arange(example.targets, dtype=np.float32) - 7 for example in EXAMPLES]
    write_scores(tmp_path, "key", scores)
    for made, expected in zip(read_scores(tmp_path, "key", EXAMPLES), scores, strict=True):
        np.testing.assert_array_equal(made, expected)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    harm(tmp_path / FILE)
    with caplog.at_level(logging.WARNING):
        assert read_scores(tmp_path, key, EXAMPLES) is None
    assert warning in caplog.text
    assert "scoring the examples anew" in caplog.text


def test_no_scores_are_no_reason_to_warn(tmp_path, caplog):
    assert read_scores(tmp_path, "key", EXAMPLES) is None
    assert caplog.text == ""


def test_the_key_tells_weights_dtypes_and_data_apart(tmp_path):
    def key(*overrides):
        return reference_key(build(recipes.load(TINY / "dpo.yaml", [*ONE_DEVICE, *overrides])))

    options = ["seed=1", "data.max_tokens=60", "model.dtype=bfloat16", "data.held_out_fraction=0", "data.chat=false"]
    keys = [key(), *map(key, options)]
    assert len(set(keys)) == len(keys)
    assert key("optimizer.learning_rate=1", "data.examples_per_step=3", "model.remat=full") == keys[0]

    for name, params in (("model", draw(BASE256)), ("other", draw(BASE256, 1))):
        save_params(tmp_path / name, params, BASE256)
        write_byte_tokenizer(tmp_path / name)
    of = lambda name: reference_key(
        build(recipes.load(TINY / "dpo.yaml", [*ONE_DEVICE[:2], "model.random=null", f"model.path={tmp_path / name}"]))
    )
    first = of("model")
    assert of("model") == first != of("other")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file(tensors | {name: tensors[name] * 2}, file)
    assert of("model") != first


def test_an_example_is_scored_once():
    job = build(recipes.load(TINY / "dpo.yaml", ONE_DEVICE))
    assert len(scored_examples(job)) == len(set(scored_examples(job))) == 16


@pytest.mark.parametrize(
    ("kind", "reason"), [("kto", "pairs prompts with answers of other"), ("orpo", "has no reference")]
)
def test_losses_without_fixed_reference_scores_refuse_the_cache(kind, reason):
    with pytest.raises(recipes.RecipeError, match=f"cache_reference=true: algorithm.kind={kind} {reason}"):
        recipes.load(TINY / f"{kind}.yaml", ["training.cache_reference=true"])
