"""A small byte-level BPE tokenizer in a folder, as a model would ship it."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
TEXTS = [
    "What is 3 + 4? Answer with just the number.",
    "The quick brown fox; jumps over 12 lazy dogs!\n",
    "user assistant",
]


def _train(adds_bos):
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture
def make_folder(tmp_path):
    """make_folder(config, adds_bos=False, files={name: json or text}) -> folder; `config` is tokenizer_config.json."""

    def make(config=None, adds_bos=False, files=None, prepare=lambda tokenizer: None):
        folder = tmp_path / "model"
        folder.mkdir()
        tokenizer = _train(adds_bos)
        prepare(tokenizer)
        tokenizer.save(str(folder / "tokenizer.json"))
        default = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
        contents = {"tokenizer_config.json": default | (config or {}), **(files or {})}
        for name, content in contents.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")
        return folder

    return make
