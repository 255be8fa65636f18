"""The samples of one HTTP request as they come: tokens from the scheduler's thread, told as text."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.rollout.step_records import Burst, Request
from jaxrl_post.serving.detokenize import Detokenizer, StopText
from jaxrl_post.serving.scheduler import Group, QueueFullError, Scheduler
from jaxrl_post.types import StopReason


@dataclasses.dataclass(frozen=True)
class Token:
    """A sampled id, its log-prob under softmax(logits), and the likeliest ids there with theirs."""

    id: int
    logp: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one sample gained. `finish` is "stop" or "length" on its last piece."""

    text: str
    tokens: tuple[Token, ...]
    finish: str | None


class SampleText:
    """One sample's tokens so far, as far as they are text for the client."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int):
        self._text, self._stop = Detokenizer(tokenizer), StopText(stop)
        self._left = min_tokens  # tokens to come before stop strings are heeded

    def take(self, burst: Burst) -> Piece:
        """Up to the token that completes a stop string; what follows it does not count."""
        text, tokens = "", []
        for i, token in enumerate(burst.ids.tolist()):
            top = zip(burst.top_ids[i].tolist(), burst.top_logp[i].tolist(), strict=True)
            tokens.append(Token(token, float(burst.raw_logp[i]), tuple(top)))
            text += self._stop.push(self._text.push([token]), heeded=self._left <= 0)
            self._left -= 1
            if self._stop.found is not None:
                return Piece(text, tuple(tokens), "stop")
        if burst.stop is None:
            return Piece(text, tuple(tokens), None)
        text += self._stop.push(self._text.rest())
        return Piece(text + self._stop.rest(), tuple(tokens), self._reason(burst.stop))

    def _reason(self, stop: StopReason) -> str:
        return "stop" if stop is StopReason.STOP or self._stop.found is not None else "length"


class RequestTimeoutError(Exception):
    """A request took longer than the server lets it."""


class Answer:
    """All samples of a request, from the moment they are queued. Close it, or its samples go on."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        prompts: Sequence[tuple[Sequence[int], Sequence[Request]]],
        stop: Sequence[str],
        seconds: float,
    ):
        """Queue samples of each prompt, numbered through. Raises: as `Scheduler.submit`; then nothing is queued."""
        self._scheduler, self._loop = scheduler, asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._events: asyncio.Queue[tuple[int, Burst | Exception]] = asyncio.Queue()
        self._groups: dict[int, tuple[Group, int]] = {}  # of samples that go on
        self._texts: list[SampleText] = []
        try:
            for ids, requests in prompts:
                first = len(self._texts)
                group = scheduler.submit(ids, requests, functools.partial(self._hear, first))
                self._texts += [SampleText(tokenizer, stop, request.decoding.min_tokens) for request in requests]
                self._groups |= {first + i: (group, i) for i in range(len(requests))}
        except (QueueFullError, ValueError):
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._texts)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(number of the sample, what it gained), until all have finished.

        Raises: RequestTimeoutError, StoppedError, and what the engine did.
        """
        try:
            while self._groups:
                sample, event = await self._next()
                if sample not in self._groups:
                    continue
                if isinstance(event, Exception):
                    raise event
                piece = self._texts[sample].take(event)
                if piece.finish is not None:
                    self._finish(sample, cancel=event.stop is None)
                yield sample, piece
        finally:
            self.close()

    def close(self) -> None:
        """Give up what goes on."""
        for sample in list(self._groups):
            self._finish(sample, cancel=True)

    async def _next(self) -> tuple[int, Burst | Exception]:
        try:
            return await asyncio.wait_for(self._events.get(), self._deadline - self._loop.time())
        except TimeoutError:
            raise RequestTimeoutError("the request took longer than this server lets it") from None

    def _hear(self, first: int, sample: int, event: Burst | Exception) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, (first + sample, event))

    def _finish(self, sample: int, cancel: bool) -> None:
        group, number = self._groups.pop(sample)
        if cancel:
            self._scheduler.cancel(group, number)
