"""The small, fixed workload of the benchmarks: a model any engine can run, prompts, and pairs of answers.

A Llama of 5.25M parameters in float32, 32 prompts of 8 to 32 tokens, 8 samples of each, at most 96 new tokens.
`fixed`: nobody stops early. `ragged`: a chance of about 1/30 to stop at every token, so that lengths are geometric. The
chance is in the weights: hidden dim 0 keeps the embedding's constant, since no layer writes to it, and the head's
column 0 is then a bias of the logits.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Params, abstract
from jaxrl_post.models.huggingface_export import save_params

CONFIG = ModelConfig("llama", 2048, 256, 768, 6, 8, 4, 32, max_positions=512, tie_embeddings=True)
PROMPTS, GROUP, SHORTEST, LONGEST, MAX_NEW = 32, 8, 8, 32, 96
PAD, UNKNOWN, STOP, SEED = 0, 1, 2, 20261130
NEVER = -45.0
STOP_BIAS = {"fixed": NEVER, "ragged": 9.1748}  # ragged: found by bisection for a mean P(stop) of 1/30
PAIRS, PAIR_PROMPT, PAIR_ANSWER = 32, 32, 96


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(SEED + 1)
    lengths = (int(rng.integers(SHORTEST, LONGEST + 1)) for _ in range(PROMPTS))
    return [rng.integers(STOP + 1, CONFIG.vocab_size, length).tolist() for length in lengths]


def weights(stop_bias: float) -> Params:
    """Normal with deviation 0.02, but for what keeps hidden dim 0 constant and turns it into a bias of the logits."""
    rng = np.random.default_rng(SEED)
    _, shapes, _ = abstract(CONFIG)

    def weight(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if "norm" in jax.tree_util.keystr(path):
            return np.ones(leaf.shape, np.float32)
        return 0.02 * rng.standard_normal(leaf.shape, np.float32)

    params = jax.tree_util.tree_map_with_path(weight, shapes)
    params["layers"]["o"][..., 0] = params["layers"]["down"][..., 0] = 0.0
    params["embed"][:, 0] = 0.1
    params["embed"][[PAD, UNKNOWN], 0] = NEVER
    params["embed"][STOP, 0] = stop_bias
    return jax.tree.map(jnp.asarray, params)


def write_workload(folder: Path, workload: str) -> None:
    """A Hugging Face folder `model`, prompts.jsonl and pairs.jsonl; a token is a word w3, w4, …."""
    names = ["<pad>", "<unk>", "<eos>"]
    words = names + [f"w{i}" for i in range(len(names), CONFIG.vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(names)
    files = folder / "files"
    files.mkdir()
    tokenizer.save(str(files / "tokenizer.json"))
    flags = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (files / "tokenizer_config.json").write_text(json.dumps(flags | {"unk_token": "<unk>", "padding_side": "left"}))
    (files / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP, "pad_token_id": 0}))
    save_params(folder / "model", weights(STOP_BIAS[workload]), CONFIG, files)
    _write_rows(folder / "prompts.jsonl", [{"prompt": text(ids), "ids": ids} for ids in prompts()])
    _write_rows(folder / "pairs.jsonl", pairs())


def pairs() -> list[dict[str, str]]:
    """Prompt and answers of equal lengths; the end token that closes an answer is its 96th."""
    rng = np.random.default_rng(SEED + 2)
    words = lambda count: text(rng.integers(STOP + 1, CONFIG.vocab_size, count).tolist())
    return [
        {"prompt": words(PAIR_PROMPT), "chosen": words(PAIR_ANSWER - 1), "rejected": words(PAIR_ANSWER - 1)}
        for _ in range(PAIRS)
    ]


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def _write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
