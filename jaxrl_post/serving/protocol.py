"""What a client may ask for: the fields of OpenAI's completions and chat completions, and what they become.

Fields that would change the answer and are not implemented are refused by name; a null is a field not given. Sampling
options beyond OpenAI's have vLLM's names. One that is not given is as the server's own `Decoding` has it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxrl_post.rollout.decoding import MOST_LOGPROBS, Decoding, check_ids
from jaxrl_post.rollout.step_records import Request

AS_GIVEN = (
    "temperature", "top_p", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "ignore_eos",
)  # fmt: skip
MOST_CHOICES = 128
MOST_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16


Json = dict[str, Any]


class BadRequestError(Exception):
    """Something in a request is wrong; `param` names the field, `status` is the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Asked(BaseModel):
    """What both kinds of requests have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    def stop_strings(self, own: Sequence[str]) -> tuple[str, ...]:
        """The request's, or the server's own. Raises: BadRequestError."""
        asked = own if self.stop is None else self.stop
        strings = (asked,) if isinstance(asked, str) else tuple(asked)
        if not all(strings):
            raise BadRequestError("stop strings must have at least one character", "stop")
        return strings

    @property
    def top(self) -> int | None:
        """Likeliest tokens to report beside the sampled one's log-prob; None reports neither."""
        raise NotImplementedError

    def requests(self, room: int, default_limit: int, vocab_size: int, own: Decoding) -> list[Request]:
        """One for each of the n samples. `room` is what a slot has left after the prompt. Raises: BadRequestError."""
        limit = self.limit or min(default_limit, room)
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**32
        decoding = self.decoding(vocab_size, own)
        return [Request(limit, decoding, id=i, seed=seed) for i in range(self.n)]

    def decoding(self, vocab_size: int, own: Decoding) -> Decoding:
        """What is asked for, and the server's own else. Stop strings are looked for in the text, where what may begin
        one has to wait anyway."""
        given: Json = {name: value for name in AS_GIVEN if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)
        if self.logit_bias is not None:
            given["logit_bias"] = _by_id(self.logit_bias, vocab_size)
        if self.stop_token_ids is not None:
            _checked_ids("stop_token_ids", self.stop_token_ids, vocab_size)
            given["stop_ids"] = tuple(self.stop_token_ids)
        return dataclasses.replace(own, **given, stop=(), top_logprobs=self.top or 0)

    @property
    def limit(self) -> int | None:
        return self.max_tokens


class CompletionRequest(Asked):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: Literal[False] = False
    best_of: int | None = None
    suffix: None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One entry for each prompt, as text or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [token for token in self.prompt if isinstance(token, int)]
        return [ids] if ids else [part for part in self.prompt if not isinstance(part, int)]


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]


class ChatRequest(Asked):
    """`tools` go to the chat template; what the model makes of them comes back as text."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs=true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None

    def conversation(self, system_prompt: str | None) -> list[dict[str, Any]]:
        """The messages, with plain text for content, after a system turn where they bring none of their own."""
        messages = [_plain(message, i) for i, message in enumerate(self.messages)]
        if system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": system_prompt}, *messages]

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat template is given beside the messages."""
        if clash := {"messages", "add_generation_prompt"} & self.chat_template_kwargs.keys():
            raise BadRequestError(f"chat_template_kwargs cannot hold {sorted(clash)}", "chat_template_kwargs")
        tools = self.tools if self.tool_choice == "auto" else None
        return self.chat_template_kwargs | ({"tools": tools} if tools else {})


def _by_id(logit_bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if words := [key for key in logit_bias if not key.isdecimal()]:
        raise BadRequestError(f"logit_bias: {words[0]!r} is not the number of a token", "logit_bias")
    bias = tuple((int(key), value) for key, value in logit_bias.items())
    _checked_ids("logit_bias", [token for token, _ in bias], vocab_size)
    return bias


def _checked_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    try:
        check_ids(field, ids, vocab_size)
    except ValueError as error:
        raise BadRequestError(str(error), field) from error


def _plain(message: dict[str, Any], number: int) -> dict[str, Any]:
    where = f"messages.{number}"
    if not isinstance(message.get("role"), str):
        raise BadRequestError(f"{where} has no role", "messages")
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": content or ""}
    parts = [part if isinstance(part, dict) else {} for part in content]
    if other := [part.get("type") for part in parts if part.get("type") != "text"]:
        raise BadRequestError(f"{where}: a part of type {other[0]!r} is not supported; supported: text", "messages")
    return {**message, "content": "".join(str(part.get("text", "")) for part in parts)}


Kind = TypeVar("Kind", bound=Asked)


def parse(kind: type[Kind], body: Any) -> Kind:
    """Raises: BadRequestError with the first field that is wrong."""
    if not isinstance(body, Mapping):
        raise BadRequestError("the body must be a JSON object")
    try:
        return kind.model_validate({key: value for key, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    field = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        raise BadRequestError(f"{'.'.join(map(str, first['loc']))} is not supported", field)
    raise BadRequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", field)
