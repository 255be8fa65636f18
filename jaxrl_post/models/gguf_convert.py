"""A llama.cpp GGUF file to a Hugging Face folder in float32: weights, config.json, tokenizer and chat template.

Quantised blocks are widened by the package `gguf` (extra `[gguf]`); every value is one the file stands for, exactly.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.models.config import from_huggingface
from jaxrl_post.models.gguf_header import check_header
from jaxrl_post.models.huggingface import expected_shapes
from jaxrl_post.models.shards import SINGLE, capped, write_tensors
from jaxrl_post.models.tensor_names import TENSORS

QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
PARAMETERS = {
    "token_embd": "embed",
    "output_norm": "norm",
    "output": "head",
    "blk.{layer}.attn_norm": "layers/attention_norm",
    "blk.{layer}.attn_q": "layers/q",
    "blk.{layer}.attn_k": "layers/k",
    "blk.{layer}.attn_v": "layers/v",
    "blk.{layer}.attn_output": "layers/o",
    "blk.{layer}.ffn_norm": "layers/mlp_norm",
    "blk.{layer}.ffn_gate": "layers/gate",
    "blk.{layer}.ffn_up": "layers/up",
    "blk.{layer}.ffn_down": "layers/down",
}
CONTROL, USER_DEFINED = 3, 4  # token types that become added tokens
Metadata = Callable[..., Any]  # (key, [default]) -> value; ValueError without both


def convert(path: str | Path, folder: str | Path) -> None:
    """Fill an existing, empty `folder` from the GGUF file at `path`.

    Raises: ValueError for a missing package, a broken or truncated file, and an architecture, tokenizer or tensor type
    that is not supported, by name.
    """
    path, folder = Path(path), Path(folder)
    reader = _open(path)
    get = _metadata(path, reader)
    with _values_named(path):
        config = _config(path, get, [tensor.name for tensor in reader.tensors])
        tokenizer, tokenizer_config = _tokenizer(path, get)
    tensors = _tensors(path, reader, config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_tensors(folder / SINGLE, tensors)
    files = {
        "config.json": config,
        "generation_config.json": special,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        gguf = importlib.import_module("gguf")
    except ImportError:
        raise ValueError("reading GGUF needs the package gguf: pip install 'jaxrl-post[gguf]'") from None
    try:
        check_header(path, gguf.GGML_QUANT_SIZES)
        return gguf.GGUFReader(path)
    except Exception as error:  # the reader indexes into the file, so a broken one fails in many ways
        raise ValueError(f"{path} is not a complete GGUF file ({error}): it may be truncated") from None


@contextlib.contextmanager
def _values_named(path: Path) -> Iterator[None]:
    """Metadata of another type than their keys stand for fail in any of these ways."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path}: the GGUF metadata hold values that do not fit their keys: {error!r}") from None


def _metadata(path: Path, reader: Any) -> Metadata:
    def get(key: str, *default: Any) -> Any:
        if key not in reader.fields:
            if default:
                return default[0]
            raise ValueError(f"{path}: the GGUF metadata lacks {key!r}")
        return reader.fields[key].contents()

    return get


def _config(path: Path, get: Metadata, tensors: list[str]) -> dict[str, Any]:
    """config.json."""
    architecture = get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: GGUF architecture {architecture!r} is not supported; supported: llama")
    if get("llama.rope.scaling.type", "none") != "none":
        raise ValueError(f"{path}: GGUF rope scaling {get('llama.rope.scaling.type')!r} is not supported")
    heads, hidden = get("llama.attention.head_count"), get("llama.embedding_length")
    # The decimal that rounds to the stored float32: 1e-05, not 9.99999975e-06.
    eps = float(str(np.float32(get("llama.attention.layer_norm_rms_epsilon"))))
    eos = get("tokenizer.ggml.eos_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv", heads),
        "head_dim": get("llama.rope.dimension_count", hidden // heads),
        "vocab_size": len(get("tokenizer.ggml.tokens")),
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": eps,
        "rope_theta": float(str(np.float32(get("llama.rope.freq_base", 10_000.0)))),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "pad_token_id": get("tokenizer.ggml.padding_token_id", eos),
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _tensors(path: Path, reader: Any, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor under its Hugging Face name, float32. All names, types and shapes are checked before one is read."""
    expected = expected_shapes(from_huggingface(config))
    heads = {"layers/q": config["num_attention_heads"], "layers/k": config["num_key_value_heads"]}
    found = {tensor.name: (tensor, *_names(path, tensor.name)) for tensor in reader.tensors}
    _check(path, {name: tensor for tensor, _, name in found.values()}, expected)
    return {name: _weight(tensor, expected[name], heads.get(parameter)) for tensor, parameter, name in found.values()}


def _names(path: Path, name: str) -> tuple[str, str]:
    """Our parameter and the Hugging Face tensor that a GGUF tensor holds."""
    layer = next(iter(re.findall(r"^blk\.(\d+)\.", name)), None)
    stem = name.removesuffix(".weight").replace(f"blk.{layer}.", "blk.{layer}.")
    if stem not in PARAMETERS or not name.endswith(".weight"):
        raise ValueError(f"{path}: GGUF tensor {name!r} has no place in a llama decoder")
    return PARAMETERS[stem], TENSORS[PARAMETERS[stem]].name.format(layer=layer)


def _check(path: Path, found: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        kind, shape = found[name].tensor_type.name, tuple(int(n) for n in reversed(found[name].shape))
        if kind not in QUANTISATIONS:
            problems.append(f"{found[name].name} has type {kind}, supported are {' '.join(QUANTISATIONS)}")
        if shape != expected[name]:
            problems.append(f"{found[name].name} has shape {list(shape)}, expected {list(expected[name])}")
    if problems:
        raise ValueError(f"{path}: the GGUF tensors cannot be converted: {capped(problems)}")


def _weight(tensor: Any, shape: tuple[int, ...], heads: int | None) -> np.ndarray:
    values = importlib.import_module("gguf").dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return np.array(values if heads is None else _unpermute(values, heads), dtype=np.float32, order="C")


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps each rotary pair of a head in neighbouring rows; here pairs are (n, n + N/2)."""
    out, inputs = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, inputs).swapaxes(1, 2).reshape(out, inputs)


def _tokenizer(path: Path, get: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE whose digits stand alone."""
    kind = (get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", None), get("tokenizer.ggml.add_bos_token", False))
    if kind != ("gpt2", "smollm", False):
        raise ValueError(
            f"{path}: GGUF tokenizer (model, pre, add_bos_token)={kind} is not supported; "
            "supported: ('gpt2', 'smollm', False)"
        )
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    bos, eos = (tokens[get(f"tokenizer.ggml.{name}_token_id")] for name in ("bos", "eos"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bpe = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in get("tokenizer.ggml.merges")],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, token, kind == CONTROL)
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": bpe,
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": tokens[get("tokenizer.ggml.padding_token_id", get("tokenizer.ggml.eos_token_id"))],
        "clean_up_tokenization_spaces": False,
        "model_max_length": get("llama.context_length"),
        "chat_template": get("tokenizer.chat_template", None),
    }
    return tokenizer, config


def _added(i: int, token: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": token, **flags, "special": special}
