"""Against transformers on CPU, in both directions: logits, gradients, exported tensors."""

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file
from tiny_models import CASES, assert_same_bits, draw, logits_of, shardings_on

from jaxrl_post.data.tokenizer import load_tokenizer
from jaxrl_post.models.config import from_huggingface, to_huggingface
from jaxrl_post.models.decoder import abstract
from jaxrl_post.models.huggingface import load_params, read_config
from jaxrl_post.models.huggingface_export import save_params
from jaxrl_post.training.routing import Whole, balance_loss, load
from launch.fetch import fetch

TOKENS = np.random.default_rng(1).integers(0, 96, (2, 24))


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    """A transformers model with every parameter drawn anew, saved as transformers saves it."""
    folder = tmp_path_factory.mktemp(request.param)
    raw = {k: v for k, v in to_huggingface(CASES[request.param]).items() if k != "architectures"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator) + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    return CASES[request.param], folder, model.float().eval()


def torch_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def test_config_is_read_as_transformers_wrote_it(reference):
    config, folder, model = reference
    read = read_config(folder)
    assert read == dataclasses.replace(config, initializer_range=read.initializer_range)
    assert read.parameter_count() == model.num_parameters()


def test_logits_equal_transformers(reference):
    config, folder, model = reference
    params = load_params(folder, config, shardings_on(config))
    ours, theirs = np.asarray(logits_of(config)(params, jnp.asarray(TOKENS))), torch_logits(model)
    assert np.abs(theirs).max() > 1  # a flat model would agree with anything
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["mixtral", "qwen2_moe", "qwen3_moe"], indirect=True)
def test_router_logits_and_balance_loss_equal_transformers(reference):
    config, folder, model = reference
    params, graphdef = load_params(folder, config, shardings_on(config)), abstract(config)[0]
    positions, ones = np.broadcast_to(np.arange(24), TOKENS.shape), np.ones_like(TOKENS)
    routed = jax.jit(lambda params: nnx.merge(graphdef, params).routed(TOKENS, positions, ones, 0 * ones)[1])
    routing = routed(params)
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS), output_router_logits=True)
    for ours, layer in zip(routing.logits, theirs.router_logits, strict=True):
        np.testing.assert_allclose(ours.reshape(-1, config.moe.count), layer, rtol=0, atol=2e-4)
    load_E = load(routing.choices, ones.astype(np.float32), config.moe.count).sum(0) / routing.choices[..., 0].size
    whole = Whole(np.float32(TOKENS.size), load_E)
    np.testing.assert_allclose(balance_loss(routing.logits, np.float32(ones), whole), theirs.aux_loss, rtol=1e-4)


def test_export_gives_back_every_tensor_bit_for_bit_and_transformers_loads_it(reference, tmp_path):
    config, folder, model = reference
    params = load_params(folder, config, shardings_on(config))
    save_params(tmp_path / "out", params, config, source=folder, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    written = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors = load_file(tmp_path / "out" / file)
        assert tensors
        assert all(index["weight_map"][name] == file for name in tensors)
        written |= tensors
    original = load_file(folder / "model.safetensors")
    assert written.keys() == original.keys() == index["weight_map"].keys()
    assert_same_bits(written, original)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    np.testing.assert_array_equal(torch_logits(again), torch_logits(model))


@pytest.mark.parametrize("reference", ["llama3-rope", "qwen3"], indirect=True)
def test_config_without_a_source_is_one_transformers_understands(reference, tmp_path):
    config, folder, model = reference
    params = load_params(folder, config, shardings_on(config))
    save_params(tmp_path / "out", params, config)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    np.testing.assert_array_equal(torch_logits(again), torch_logits(model))
    assert from_huggingface(to_huggingface(config)) == config


@pytest.mark.parametrize("reference", ["llama", "qwen2"], indirect=True)
def test_one_sgd_step_on_a_tied_and_an_untied_embedding_equals_torch(reference, tmp_path):
    """A tied embedding's gradient is the sum of its two uses, table and head; the norm counts it once."""
    config, folder, original = reference
    model, params = copy.deepcopy(original), load_params(folder, config, shardings_on(config))

    def loss(params):
        logp = jax.nn.log_softmax(logits_of(config)(params, jnp.asarray(TOKENS)))[:, :-1]
        return -jnp.take_along_axis(logp, jnp.asarray(TOKENS)[:, 1:, None], axis=-1).mean()

    grads = jax.jit(jax.grad(loss))(params)
    model.zero_grad()
    logits = model(torch.tensor(TOKENS)).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(TOKENS[:, 1:]).flatten()).backward()
    theirs = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    assert ("lm_head.weight" in theirs) == ("head" in grads) == (not config.tie_embeddings)
    np.testing.assert_allclose(grads["embed"], theirs["model.embed_tokens.weight"], rtol=0, atol=2e-6)
    norm = np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(norm, torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item(), rtol=1e-5)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    stepped = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    assert np.abs(torch_logits(model) - torch_logits(original)).max() > 0.1
    np.testing.assert_allclose(logits_of(config)(stepped, jnp.asarray(TOKENS)), torch_logits(model), rtol=0, atol=2e-4)
    save_params(tmp_path / "out", stepped, config, source=folder, max_shard_bytes=20_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    np.testing.assert_allclose(torch_logits(again), torch_logits(model), rtol=0, atol=2e-4)


def test_bfloat16_export_is_the_rounded_array(tmp_path):
    config = CASES["qwen3"]
    params = draw(config)
    save_params(tmp_path / "out", params, config, dtype="bfloat16")
    back = load_params(tmp_path / "out", dataclasses.replace(config, param_dtype="bfloat16"), shardings_on(config))
    assert_same_bits(back, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.real
def test_the_real_smollm2_equals_transformers_on_a_chat_prompt():
    folder = fetch("smollm2-135m")
    config, tokenizer = read_config(folder), load_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.encode_chat(messages)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    params = load_params(folder, config, shardings_on(config))
    ours = np.asarray(logits_of(config)(params, jnp.asarray([ids])))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-4)
    np.testing.assert_array_equal(ours.argmax(-1), expected.argmax(-1))
    assert tokenizer.decode([ours[0, -1].argmax()]) == "The"  # … capital of France is Paris.
