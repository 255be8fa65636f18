"""The byte tokenizer of random models, written as the files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxrl_post.data.tokenizer import ByteTokenizer, byte_alphabet

SPECIAL = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"}


def write_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json with the ids of `ByteTokenizer`."""
    tokenizer = ByteTokenizer()
    (eos_id,) = tokenizer.stop_ids
    ids = {"bos": tokenizer.bos_id, "eos": eos_id, "pad": tokenizer.pad_id}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bytes_alone = {"type": "BPE", "vocab": {char: byte for byte, char in enumerate(byte_alphabet())}, "merges": []}
    files: dict[str, dict[str, Any]] = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [{"id": ids[k], "content": text, **flags, "special": True} for k, text in SPECIAL.items()],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": bytes_alone,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{kind}_token": text for kind, text in SPECIAL.items()},
            "clean_up_tokenization_spaces": False,
            "chat_template": tokenizer.chat_template,
        },
        "generation_config.json": {f"{kind}_token_id": i for kind, i in ids.items()},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
