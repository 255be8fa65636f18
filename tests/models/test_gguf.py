"""GGUF to a Hugging Face folder, against float64 arithmetic on the stored blocks."""

import json
import sys

import numpy as np
import pytest
import tokenizers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.gguf_convert import convert
from jaxrl_post.models.huggingface import read_config

RNG = np.random.default_rng(5)
WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 4, 2, 16, 32
TOKENS = ["<|end|>", "<tool>", *"abc1", "ab"]
UP = "model.layers.0.mlp.up_proj.weight"


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def tensors():
    return {
        "token_embd": f32(len(TOKENS), WIDTH),
        "output_norm": f32(WIDTH),
        "blk.0.attn_norm": f32(WIDTH),
        "blk.0.attn_q": f32(HEADS * HEAD_DIM, WIDTH),
        "blk.0.attn_k": f32(KV_HEADS * HEAD_DIM, WIDTH),
        "blk.0.attn_v": f32(KV_HEADS * HEAD_DIM, WIDTH),
        "blk.0.attn_output": f32(WIDTH, HEADS * HEAD_DIM),
        "blk.0.ffn_norm": f32(WIDTH),
        "blk.0.ffn_gate": f32(MLP, WIDTH),
        "blk.0.ffn_up": f32(MLP, WIDTH),
        "blk.0.ffn_down": f32(WIDTH, MLP),
    }


def write(path, weights, architecture="llama", pre="smollm", up=None, scaling=None):
    """A one-layer file; `up` is (bytes, type) of the up projection in place of float32."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL, TokenType.USER_DEFINED] + [TokenType.NORMAL] * 5)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, weight in weights.items():
        if name == "blk.0.ffn_up" and up is not None:
            writer.add_tensor(f"{name}.weight", up[0], raw_dtype=up[1])
        else:
            writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(tmp_path, *args, **options):
    (tmp_path / "hf").mkdir()
    convert(write(tmp_path / "m.gguf", *args, **options), tmp_path / "hf")
    return load_file(tmp_path / "hf" / "model.safetensors")


def blocks(kind):
    """The bytes of 32 × 64 random values, as 64 blocks of 32, and what they stand for in float64."""
    scale = RNG.uniform(0.01, 0.1, (64, 1)).astype(np.float16)
    low = RNG.uniform(-1, 0, (64, 1)).astype(np.float16)
    if kind is Kind.Q8_0:
        q = RNG.integers(-128, 128, (64, 32)).astype(np.int8)
        return np.hstack([scale.view(np.uint8), q.view(np.uint8)]), scale.astype(np.float64) * q
    q = RNG.integers(0, 16, (64, 32))
    nibbles = (q[:, :16] | q[:, 16:] << 4).astype(np.uint8)  # a byte holds elements i and i + 16
    if kind is Kind.Q4_0:
        return np.hstack([scale.view(np.uint8), nibbles]), scale.astype(np.float64) * (q - 8)
    return np.hstack([scale.view(np.uint8), low.view(np.uint8), nibbles]), scale.astype(np.float64) * q + low


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_quantised_blocks_widen_to_what_they_stand_for(tmp_path, kind):
    data, values = blocks(kind)
    got = converted(tmp_path, tensors(), up=(data.reshape(MLP, -1), kind))[UP]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, values.reshape(MLP, WIDTH), rtol=2**-23, atol=1e-9)


def test_float_tensors_are_exact(tmp_path):
    half = f32(MLP, WIDTH).astype(np.float16)
    np.testing.assert_array_equal(converted(tmp_path, tensors() | {"blk.0.ffn_up": half})[UP], half.astype(np.float32))


def test_bfloat16_tensors_are_exact(tmp_path):
    bits = f32(MLP, WIDTH).view(np.uint32) >> 16
    got = converted(tmp_path, tensors(), up=(bits.astype(np.uint16).view(np.uint8), Kind.BF16))[UP]
    np.testing.assert_array_equal(got, (bits << 16).view(np.float32))


def test_rows_of_queries_and_keys_go_back_to_halves_and_all_else_stays(tmp_path):
    weights = tensors()
    got = converted(tmp_path, weights)
    attention = "model.layers.0.self_attn"
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        theirs = weights[f"blk.0.attn_{name}"]
        for head in range(heads):
            for n in range(HEAD_DIM // 2):  # pair n sits in rows 2n, 2n + 1 there, in rows n, n + 8 here
                for half in (0, 1):
                    np.testing.assert_array_equal(
                        got[f"{attention}.{name}_proj.weight"][head * HEAD_DIM + half * HEAD_DIM // 2 + n],
                        theirs[head * HEAD_DIM + 2 * n + half],
                    )
    np.testing.assert_array_equal(got[f"{attention}.v_proj.weight"], weights["blk.0.attn_v"])
    np.testing.assert_array_equal(got["model.embed_tokens.weight"], weights["token_embd"])
    assert len(got) == len(weights)


def test_config_and_tokenizer_files(tmp_path):
    converted(tmp_path, tensors())
    assert read_config(tmp_path / "hf") == ModelConfig(
        family="llama", vocab_size=7, hidden_size=WIDTH, intermediate_size=MLP, layers=1, heads=HEADS,
        kv_heads=KV_HEADS, head_dim=HEAD_DIM, rope_theta=100_000.0, norm_eps=1e-5, max_positions=128,
        tie_embeddings=True,
    )  # fmt: skip
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert tokenizer.encode("abc11<|end|>").ids == [6, 4, 5, 5, 0]
    assert tokenizer.decode([6, 0, 1]) == "ab<tool>"  # special tokens are left out, user-defined ones are text
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages[0].content }}"
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 0


def test_an_untied_head_is_kept(tmp_path):
    head = f32(len(TOKENS), WIDTH)
    np.testing.assert_array_equal(converted(tmp_path, tensors() | {"output": head})["lm_head.weight"], head)
    assert not read_config(tmp_path / "hf").tie_embeddings


@pytest.mark.parametrize("left", [3, 20, 300, -64])
def test_a_truncated_file_is_named(tmp_path, left):
    path = write(tmp_path / "m.gguf", tensors())
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"m.gguf is not a complete GGUF file .*truncated"):
        convert(path, tmp_path)


def test_what_is_not_supported_is_refused_by_name(tmp_path):
    def refused(message, weights=None, **options):
        with pytest.raises(ValueError, match=message):
            convert(write(tmp_path / "m.gguf", weights or tensors(), **options), tmp_path)

    refused("architecture 'gemma' is not supported", architecture="gemma")
    refused("'llama-bpe'", pre="llama-bpe")
    refused("rope scaling 'yarn'", scaling="yarn")
    q5 = np.zeros((MLP, WIDTH // 32 * 22), np.uint8)
    refused("blk.0.ffn_up.weight has type Q5_0, supported are F32", up=(q5, Kind.Q5_0))
    refused("'rope_freqs.weight' has no place", tensors() | {"rope_freqs": f32(8)})
    refused("norm.weight is missing", {k: v for k, v in tensors().items() if k != "output_norm"})
    refused(r"output_norm.weight has shape \[63\], expected \[64\]", tensors() | {"output_norm": f32(63)})
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", tensors())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl-post\[gguf\]'"):
        convert(path, tmp_path)
