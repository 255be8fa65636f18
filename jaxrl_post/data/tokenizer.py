"""Text to token ids and back: a Hugging Face folder read with `tokenizers`, or plain bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from jaxrl_post.data.chat_template import Message, compile_own, compile_template


class Tokenizer(Protocol):
    """What the stack asks of a tokenizer, wherever it comes from."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""

    @property
    def bos_id(self) -> int | None:
        """Beginning-of-sequence id; None when the tokenizer has none."""

    @property
    def pad_id(self) -> int:
        """What fills empty places. It may equal a stop id: lengths are carried, never read off the padding."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a response; empty for a model that declares none."""

    @property
    def adds_bos(self) -> bool:
        """Whether plain text is meant to begin with `bos_id`. A chat template spells its own."""

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Ids of the text; special tokens written out in it become their ids where the tokenizer knows them."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids."""

    def render_chat(self, messages: list[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Text of a conversation; with `add_generation_prompt` it ends where the assistant's turn begins."""

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Ids of a conversation up to the assistant's turn."""

    def vocabulary(self) -> dict[str, int]:
        """Id of every token, by its name in the tokenizer's files: what tells vocabularies apart."""

    def token_bytes(self) -> list[bytes]:
        """What each id adds to the text, special tokens nothing: the text is these, one after the other.

        Raises: ValueError for a tokenizer whose texts are not made so.
        """


def load_tokenizer(folder: str | Path | None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, or the byte tokenizer for None."""
    return ByteTokenizer() if folder is None else FolderTokenizer(folder)


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder.

    Reads tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json, generation_config.json,
    config.json and chat_template.jinja (which goes before the template in tokenizer_config.json). `stop_ids` are the
    end-of-sequence ids of generation_config.json, config.json and tokenizer_config.json together; each may be an id,
    a list, or a token's text. `adds_bos` is what the post-processor in
    tokenizer.json does. Truncation and padding kept in tokenizer.json are switched off.
    Raises ValueError for missing or unreadable files and for special tokens outside the vocabulary, naming the file.
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._tokenizer = _read_tokenizer(self._folder / "tokenizer.json")
        self._config = _read_json(self._folder / "tokenizer_config.json")
        self._special = _special_tokens(_read_json(self._folder / "special_tokens_map.json") | self._config)
        generation, model = (_read_json(self._folder / name) for name in ("generation_config.json", "config.json"))
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # `"bos_token": null` says that there is none, whatever the model's own config lists.
        unsaid = {} if "bos_token" in self._config else {"config.json": model}
        self.bos_id = self._one_id("bos", {"tokenizer_config.json": self._special, **unsaid})
        self.stop_ids = frozenset(
            self._ids("generation_config.json", "eos_token_id", generation.get("eos_token_id"))
            + self._ids("config.json", "eos_token_id", model.get("eos_token_id"))
            + self._ids("tokenizer_config.json", "eos_token", self._special.get("eos_token"))
        )
        sources = {"tokenizer_config.json": self._special, "generation_config.json": generation, "config.json": model}
        pad_id = self._one_id("pad", sources)
        self.pad_id = min(self.stop_ids, default=0) if pad_id is None else pad_id
        # The post-processor puts special tokens around any text, so they show on the empty one.
        self.adds_bos = self.bos_id is not None and self._tokenizer.encode("").ids[:1] == [self.bos_id]

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        return _with_bos(self, add_bos) + self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def render_chat(self, messages: list[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """As transformers' `apply_chat_template(tokenize=False)`. Raises ValueError without a template."""
        return self._render(messages, add_generation_prompt, **{**self._special, **variables})

    def encode_chat(self, messages: list[Message]) -> list[int]:
        return self.encode(self.render_chat(messages))

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def token_bytes(self) -> list[bytes]:
        if not isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(
                f"{self._folder / 'tokenizer.json'} is not byte-level, so that stop strings cannot be found in its "
                "tokens: give rollout.stop_token_ids instead of rollout.stop"
            )
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}
        spelt = lambda name: bytes(byte_of[c] for c in name) if byte_of.keys() >= set(name) else name.encode()
        out = [b""] * (max(self.vocabulary().values()) + 1)
        for name, i in self.vocabulary().items():
            out[i] = b"" if i in special else spelt(name)
        return out

    @functools.cached_property
    def _render(self) -> Callable[..., str]:
        return compile_template(*_template_source(self._folder, self._config.get("chat_template")))

    def _ids(self, file: str, key: str, value: Any) -> list[int]:
        """The ids that one key of one file stands for; None, and -1 as some exports write it, stand for none."""
        values = value if isinstance(value, list) else [value]
        return [i for v in values if v is not None and (i := self._id(file, key, v)) >= 0]

    def _id(self, file: str, key: str, value: Any) -> int:
        token_id = self._tokenizer.token_to_id(value) if isinstance(value, str) else value
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValueError(f"{self._folder / file}: {key}={value!r} is neither a token of tokenizer.json nor an id")
        return token_id

    def _one_id(self, kind: str, files: dict[str, dict[str, Any]]) -> int | None:
        """The first id that the files give for `{kind}_token` or `{kind}_token_id`."""
        for file, content in files.items():
            for key in (f"{kind}_token", f"{kind}_token_id"):
                if ids := self._ids(file, key, content.get(key)):
                    return ids[0]
        return None


class ByteTokenizer:
    """UTF-8 bytes as ids 0…255, then bos 256, eos 257 and pad 258; the vocabulary is padded to 264.

    Needs no file: for random models, tests and models trained from nothing. A conversation is spelt `role: content`,
    a line a turn. Ids that are no valid UTF-8 decode to U+FFFD; ids from 259 up have no text.
    """

    vocab_size = 264
    bos_id = 256
    pad_id = 258
    stop_ids = frozenset({257})
    adds_bos = False
    _names = {256: b"<bos>", 257: b"<eos>", 258: b"<pad>"}  # noqa: RUF012
    chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )

    def __init__(self) -> None:
        self._render = compile_own(self.chat_template)

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        return _with_bos(self, add_bos) + list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        names = {} if skip_special else self._names
        spelt = b"".join(bytes([i]) if 0 <= i < 256 else names.get(i, b"") for i in map(int, ids))
        return spelt.decode("utf-8", errors="replace")

    def render_chat(self, messages: list[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        return self._render(messages, add_generation_prompt, **variables)

    def encode_chat(self, messages: list[Message]) -> list[int]:
        return self.encode(self.render_chat(messages))

    def vocabulary(self) -> dict[str, int]:
        special = {name.decode(): i for i, name in self._names.items()}
        return {char: byte for byte, char in enumerate(byte_alphabet())} | special

    def token_bytes(self) -> list[bytes]:
        return [*(bytes([i]) for i in range(256)), *([b""] * (self.vocab_size - 256))]


def _with_bos(tokenizer: Tokenizer, add_bos: bool) -> list[int]:
    if not add_bos:
        return []
    if tokenizer.bos_id is None:
        raise ValueError("add_bos=True, but the tokenizer has no beginning-of-sequence token")
    return [tokenizer.bos_id]


def _read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise ValueError(f"{file} does not exist: a model folder needs the tokenizer.json of a fast tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every bad file
        raise ValueError(f"{file} is not a tokenizer that `tokenizers` can read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in the file; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Texts of `bos_token`, `eos_token`, …, which templates may use; a token is its text or {"content": text}."""
    kinds = [f"{kind}_token" for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")]
    values = {kind: config.get(kind) for kind in kinds}
    texts = {kind: value.get("content") if isinstance(value, dict) else value for kind, value in values.items()}
    return {kind: text for kind, text in texts.items() if text is not None}


def _template_source(folder: Path, configured: str | Sequence[dict[str, str]] | None) -> tuple[str, str]:
    """The template's text and the file it is in; of several named templates the one called `default`."""
    file, config_file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8"), str(file)
    if isinstance(configured, list):
        configured = {entry["name"]: entry["template"] for entry in configured}.get("default")
    if not isinstance(configured, str):
        raise ValueError(
            f"no chat template: neither {file} nor a default `chat_template` in {config_file} exists. "
            "Add one, or set data.chat=false to feed prompts as plain text"
        )
    return configured, str(config_file)


def byte_alphabet() -> list[str]:
    """The visible character that byte-level BPE spells each byte with: itself, or the next one from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
