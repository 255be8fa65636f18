"""The endpoints: OpenAI's completions, chat completions and models, health and metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.rollout.decoding import Decoding
from jaxrl_post.rollout.step_records import PLAIN
from jaxrl_post.serving.answer import Answer, Piece, RequestTimeoutError
from jaxrl_post.serving.formats import ChatFormat, CompletionFormat, Envelope, Format, Json, Usage, error_json
from jaxrl_post.serving.metrics import ServerMetrics
from jaxrl_post.serving.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    Asked,
    BadRequestError,
    ChatRequest,
    CompletionRequest,
    parse,
)
from jaxrl_post.serving.scheduler import EngineError, QueueFullError, Scheduler, StoppedError

MOST_BODY_BYTES = 16 << 20
REFUSALS = (BadRequestError, QueueFullError, StoppedError, RequestTimeoutError, EngineError)


@dataclasses.dataclass(frozen=True)
class Served:
    """The model as clients see it. `seconds`: most time a request may take. `decoding`: what a request does not say."""

    name: str
    tokenizer: Tokenizer
    system_prompt: str | None
    seconds: float
    decoding: Decoding = PLAIN


class Api:
    """Handlers of one served model."""

    def __init__(self, served: Served, scheduler: Scheduler, metrics: ServerMetrics):
        self._served, self._scheduler, self._metrics = served, scheduler, metrics
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self._counted(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._counted(self._chat), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._prometheus),
        ]

    def _counted(self, handle: Callable[[HttpRequest], Awaitable[Response]]) -> Callable:
        """Errors as OpenAI spells them, every answer counted."""

        async def counted(http: HttpRequest) -> Response:
            try:
                response = await handle(http)
            except REFUSALS as error:
                response = error_response(error)
            self._metrics.requests.labels(http.url.path, str(response.status_code)).inc()
            return response

        return counted

    async def _completions(self, http: HttpRequest) -> Response:
        asked = parse(CompletionRequest, await _body(http))
        if asked.best_of not in (None, asked.n):
            raise BadRequestError("best_of other than n is not supported", "best_of")
        prompts = await asyncio.to_thread(lambda: [self._ids(prompt) for prompt in asked.prompts])
        return await self._answer(http, asked, prompts, DEFAULT_COMPLETION_TOKENS, CompletionFormat)

    async def _chat(self, http: HttpRequest) -> Response:
        asked = parse(ChatRequest, await _body(http))
        ids = await asyncio.to_thread(self._chat_ids, asked)
        return await self._answer(http, asked, [ids], self._scheduler.engine.columns, ChatFormat)

    def _ids(self, prompt: str | list[int]) -> list[int]:
        tokenizer, vocabulary = self._served.tokenizer, self._scheduler.engine.config.vocab_size
        ids = tokenizer.encode(prompt, add_bos=tokenizer.adds_bos) if isinstance(prompt, str) else prompt
        if outside := [i for i in ids if not 0 <= i < vocabulary]:
            raise BadRequestError(f"id {outside[0]} is outside the model's vocabulary of {vocabulary}", "prompt")
        return ids or ([] if tokenizer.bos_id is None else [tokenizer.bos_id])

    def _chat_ids(self, asked: ChatRequest) -> list[int]:
        messages = asked.conversation(self._served.system_prompt)
        tokenizer = self._served.tokenizer
        try:
            return tokenizer.encode(tokenizer.render_chat(messages, **asked.variables))
        except ValueError as error:
            raise BadRequestError(str(error), "messages") from error

    async def _answer(
        self,
        http: HttpRequest,
        asked: Asked,
        prompts: Sequence[Sequence[int]],
        default_limit: int,
        form: Callable[[Tokenizer, int | None], Format],
    ) -> Response:
        if asked.model != self._served.name:
            raise BadRequestError(
                f"the model {asked.model!r} does not exist; this server has {self._served.name!r}",
                "model", status=404, code="model_not_found",
            )  # fmt: skip
        began, columns = time.monotonic(), self._scheduler.engine.columns
        envelope = Envelope.new(form(self._served.tokenizer, asked.top), asked.model)
        vocabulary, own = self._scheduler.engine.config.vocab_size, self._served.decoding
        groups = [(ids, asked.requests(max(1, columns - len(ids)), default_limit, vocabulary, own)) for ids in prompts]
        stop = asked.stop_strings(own.stop)
        try:
            answer = Answer(self._scheduler, self._served.tokenizer, groups, stop, self._served.seconds)
        except ValueError as error:
            field = "messages" if isinstance(asked, ChatRequest) else "prompt"
            raise BadRequestError(str(error), field, code="context_length_exceeded") from error
        usage = Usage(sum(map(len, prompts)))
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        pieces = self._measured(answer, usage, began)
        if asked.stream:
            with_usage = asked.stream_options is not None and asked.stream_options.include_usage
            events = self._events(envelope, answer, pieces, usage if with_usage else None)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await _unless_disconnected(http, answer, self._whole(envelope, answer, pieces, usage))

    async def _whole(
        self, envelope: Envelope, answer: Answer, pieces: AsyncIterator[tuple[int, Piece]], usage: Usage
    ) -> Response:
        gained: list[list[Piece]] = [[] for _ in range(len(answer))]
        async for sample, piece in pieces:
            gained[sample].append(piece)
        text = lambda parts: "".join(piece.text for piece in parts)
        tokens = lambda parts: [token for piece in parts for token in piece.tokens]
        choices = [
            envelope.format.whole(i, text(parts), tokens(parts), parts[-1].finish) for i, parts in enumerate(gained)
        ]
        return JSONResponse(envelope.whole(choices, usage))

    async def _events(
        self, envelope: Envelope, answer: Answer, pieces: AsyncIterator[tuple[int, Piece]], usage: Usage | None
    ) -> AsyncIterator[bytes]:
        """Server-sent events; an error after the first of them can only be told in one."""
        try:
            for i in range(len(answer)):
                if (opening := envelope.format.opening(i)) is not None:
                    yield _event(envelope.chunk([opening]))
            async for sample, piece in pieces:
                if piece.text or piece.tokens or piece.finish:
                    yield _event(envelope.chunk([envelope.format.chunk(sample, piece)]))
            if usage is not None:
                yield _event(envelope.chunk([]) | {"usage": usage.json()})
            yield b"data: [DONE]\n\n"
        except REFUSALS as error:
            yield _event(json.loads(bytes(error_response(error).body)))
        finally:
            answer.close()

    async def _measured(self, answer: Answer, usage: Usage, began: float) -> AsyncIterator[tuple[int, Piece]]:
        """The answer's pieces, counted."""
        metrics, firsts, counts = self._metrics, {}, [0] * len(answer)
        async for sample, piece in answer.pieces():
            now = time.monotonic()
            if sample not in firsts:
                firsts[sample] = now
                metrics.first_token.observe(now - began)
            counts[sample] += len(piece.tokens)
            usage.completion_tokens += len(piece.tokens)
            metrics.generated_tokens.inc(len(piece.tokens))
            if piece.finish is not None:
                metrics.finished.labels(piece.finish).inc()
                metrics.whole.observe(now - began)
                metrics.per_token.observe((now - firsts[sample]) / max(1, counts[sample] - 1))
            yield sample, piece

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self._served.name:
            return error_response(BadRequestError("no such model", "model", status=404, code="model_not_found"))
        return JSONResponse(self._card())

    def _card(self) -> Json:
        return {
            "id": self._served.name, "object": "model", "created": self._created, "owned_by": "jaxrl_post",
            "max_model_len": self._scheduler.engine.columns,
        }  # fmt: skip

    async def _health(self, http: HttpRequest) -> Response:
        trouble = self._scheduler.trouble
        return JSONResponse({"status": trouble or "ok"}, 200 if trouble is None else 503)

    async def _prometheus(self, http: HttpRequest) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")


def error_response(error: Exception) -> Response:
    """One of `REFUSALS` as OpenAI spells it."""
    match error:
        case BadRequestError():
            return JSONResponse(error_json(str(error), error.status, error.param, error.code), error.status)
        case QueueFullError():
            body = error_json(str(error), 429, code="queue_full")
            return JSONResponse(body, 429, headers={"Retry-After": "1"})
        case RequestTimeoutError():
            return JSONResponse(error_json(str(error), 504, code="timeout"), 504)
        case StoppedError():
            return JSONResponse(error_json(str(error), 503, code="stopped"), 503)
    return JSONResponse(error_json(str(error), 500, code="engine_error"), 500)


def _event(body: Json) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


async def _body(http: HttpRequest) -> Any:
    """The JSON of the body. Raises: BadRequestError."""
    raw = b""
    async for part in http.stream():
        raw += part
        if len(raw) > MOST_BODY_BYTES:
            raise BadRequestError(f"the body is larger than {MOST_BODY_BYTES} bytes", status=413)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error


async def _unless_disconnected(http: HttpRequest, answer: Answer, work: Awaitable[Response]) -> Response:
    """The response; where the client leaves before it is there, its samples are given up."""
    response, gone = asyncio.ensure_future(work), asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait((response, gone), return_when=asyncio.FIRST_COMPLETED)
        return response.result() if response.done() else Response(status_code=499)
    finally:
        response.cancel()
        gone.cancel()
        answer.close()
