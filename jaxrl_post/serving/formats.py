"""OpenAI's JSON of completions and chat completions, whole and in chunks."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.serving.answer import Piece, Token
from jaxrl_post.serving.detokenize import UNREADABLE

Json = dict[str, Any]


@dataclasses.dataclass
class Usage:
    prompt_tokens: int
    completion_tokens: int = 0

    def json(self) -> Json:
        return {**dataclasses.asdict(self), "total_tokens": self.prompt_tokens + self.completion_tokens}


class Format(Protocol):
    """How the choices of one kind of answer are spelt."""

    prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, text: str, tokens: Sequence[Token], finish: str | None) -> Json: ...

    def chunk(self, index: int, piece: Piece) -> Json: ...

    def opening(self, index: int) -> Json | None:
        """The chunk that comes before a choice's first piece, if there is one."""


class TokenSpeller:
    """Tokens as text, special ones included."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)

    def bytes(self, token: int) -> list[int] | None:
        """None for a part of a character."""
        text = self.text(token)
        return None if UNREADABLE in text else list(text.encode())


class CompletionFormat:
    """/v1/completions. `top` None reports no log-probs."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, top: int | None):
        self._speller, self._top = TokenSpeller(tokenizer), top
        self._offsets: dict[int, int] = {}  # characters told of each choice

    def whole(self, index: int, text: str, tokens: Sequence[Token], finish: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, tokens), "finish_reason": finish}

    def chunk(self, index: int, piece: Piece) -> Json:
        return self.whole(index, piece.text, piece.tokens, piece.finish)

    def opening(self, index: int) -> Json | None:
        return None

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> Json | None:
        if self._top is None:
            return None
        texts, offsets = [self._speller.text(token.id) for token in tokens], []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logp for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": offsets,
        }

    def _likeliest(self, token: Token) -> dict[str, float]:
        """The sampled token's own log-prob is always among them."""
        top = {self._speller.text(i): logp for i, logp in reversed(token.top[: self._top])}
        return top | {self._speller.text(token.id): token.logp}


class ChatFormat:
    """/v1/chat/completions. `top` None reports no log-probs."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, top: int | None):
        self._speller, self._top = TokenSpeller(tokenizer), top

    def whole(self, index: int, text: str, tokens: Sequence[Token], finish: str | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def chunk(self, index: int, piece: Piece) -> Json:
        logprobs = self._logprobs(piece.tokens)
        return {"index": index, "delta": {"content": piece.text}, "logprobs": logprobs, "finish_reason": piece.finish}

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._top is None:
            return None
        likeliest = lambda token: [self._entry(*pair) for pair in token.top[: self._top]]
        entries = [self._entry(token.id, token.logp) | {"top_logprobs": likeliest(token)} for token in tokens]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logp: float) -> Json:
        return {"token": self._speller.text(token), "logprob": logp, "bytes": self._speller.bytes(token)}


@dataclasses.dataclass(frozen=True)
class Envelope:
    """What every JSON object of one answer has in common."""

    format: Format
    model: str
    id: str
    created: int

    @classmethod
    def new(cls, form: Format, model: str) -> Envelope:
        return cls(form, model, f"{form.prefix}-{uuid.uuid4().hex}", int(time.time()))

    def whole(self, choices: list[Json], usage: Usage) -> Json:
        return self._json(self.format.whole_object, choices) | {"usage": usage.json()}

    def chunk(self, choices: list[Json]) -> Json:
        return self._json(self.format.chunk_object, choices)

    def _json(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def error_json(message: str, status: int, param: str | None = None, code: str | None = None) -> Json:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
