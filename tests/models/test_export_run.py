"""A run's newest checkpoint as a Hugging Face folder."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from tiny_models import assert_same_bits, draw, logits_of, shardings_on

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxrl_post.loops.decoder_shape import model_config
from jaxrl_post.models.huggingface import load_params, read_config
from launch.__main__ import main
from launch.export import export
from sharding.placement import place

RANDOM = """
model: {random: {family: qwen2, hidden_size: 32, intermediate_size: 48, heads: 4, kv_heads: 2, head_dim: 8}}
"""


def a_run(run_dir, recipe, best=None):
    """A run folder with checkpoints of steps 1 and 2, saved from 8 devices; returns the model and step 2's weights."""
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(recipe)
    config = recipes.load(run_dir / "config.yaml")
    folder = None if config.model.path is None else config.model.path
    model = model_config(config, folder, ByteTokenizer.vocab_size)
    checkpoints = Checkpointer(run_dir / "checkpoints", 2)
    for step in (1, 2):
        params = draw(model, step)
        arrays = {"params": place(params, shardings_on(model, fsdp=4, tensor=2)), "step": jnp.int32(step)}
        checkpoints.save(step, arrays, {"data": {}, "best": best})
    checkpoints.close()
    return model, params


def test_a_random_model_is_exported_with_its_byte_tokenizer(tmp_path):
    model, params = a_run(tmp_path / "run", RANDOM)
    export(tmp_path / "run", tmp_path / "out")
    assert_same_bits(load_params(tmp_path / "out", model, shardings_on(model)), params)
    ours, theirs = ByteTokenizer(), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    folder = load_tokenizer(tmp_path / "out")
    text = "naïve 数 \x00\x7f\n" + bytes(range(128)).decode()
    assert ours.encode(text) == theirs(text).input_ids == folder.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    messages = [{"role": "user", "content": "hi"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert rendered == ours.encode_chat(messages) == folder.encode_chat(messages)
    assert (folder.stop_ids, folder.pad_id, folder.bos_id) == (ours.stop_ids, ours.pad_id, ours.bos_id)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = ours.encode("1 + 1 =")
    with torch.no_grad():
        expected = network(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(logits_of(model)(params, jnp.asarray([ids])), expected, rtol=0, atol=2e-5)
    assert network.generation_config.eos_token_id == 257


def test_an_exported_folder_trains_and_exports_again_with_its_own_files(tmp_path):
    a_run(tmp_path / "first", RANDOM)
    export(tmp_path / "first", tmp_path / "source")
    raw = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(raw | {"note": "kept"}))
    _, params = a_run(tmp_path / "second", f"model: {{path: {tmp_path / 'source'}, param_dtype: bfloat16}}")
    export(tmp_path / "second", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == raw | {"note": "kept", "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert read_config(tmp_path / "out") == read_config(tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(tensors["model.norm.weight"], np.asarray(params["norm"]), strict=True)


def test_what_cannot_be_exported_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"no_run is not the folder of a run: it has no config\.yaml"):
        export(tmp_path / "no_run", tmp_path / "out")
    assert not (tmp_path / "no_run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(RANDOM)
    with pytest.raises(ValueError, match=r"run has no checkpoints yet"):
        export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"checkpoints holds no complete checkpoint"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_into_a_folder_in_use_is_refused(tmp_path):
    a_run(tmp_path / "run", RANDOM)
    with pytest.raises(ValueError, match="run already exists and is not an empty folder"):
        export(tmp_path / "run", tmp_path / "run")


def test_a_reward_model_is_not_taken_for_a_language_model(tmp_path):
    recipe = recipes.dump(recipes.load(Path(__file__).parents[2] / "configs" / "tiny" / "reward_model.yaml"))
    (tmp_path / "config.yaml").write_text(recipe)
    with pytest.raises(ValueError, match="trained a reward model"):
        export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("word", "step"), [("1", 1), ("best", 1), ("2", 2)])
def test_another_step_than_the_newest_is_exported(word, step, tmp_path, capsys):
    best = {"step": 1, "value": 0.5, "metric": "x", "mode": "max"}
    model, _ = a_run(tmp_path / "run", RANDOM, best)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--step", word]) == 0
    assert f"wrote step {step} of" in capsys.readouterr().err
    assert_same_bits(load_params(tmp_path / "out", model, shardings_on(model)), draw(model, step))
