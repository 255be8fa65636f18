"""Text of tokens as they come, never half a character; and stop strings, wherever tokens cut them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxrl_post.data.tokenizer import Tokenizer

UNREADABLE = "\ufffd"
LONGEST_START = 3  # bytes of a character of UTF-8 that may wait for its last one


class Detokenizer:
    """Pieces of text whose concatenation, `rest` included, is `tokenizer.decode` of all ids.

    A tokenizer may spell a token by those before it, so a few are decoded again each time: from the place up to which
    the last piece went.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start, self._read = 0, 0  # tokens decoded again; those of them whose text has been told in full
        self._told = 0  # characters told of the tokens after them

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; what may be the start of a character waits."""
        self._ids += map(int, ids)
        before, now = self._texts()
        waiting = min(len(now) - len(now.rstrip(UNREADABLE)), LONGEST_START)
        new = now[len(before) + self._told : len(now) - waiting]
        if waiting:
            self._told += len(new)
        else:
            self._start, self._read, self._told = self._read, len(self._ids), 0
        return new

    def rest(self) -> str:
        """What still waited when the ids ended."""
        before, now = self._texts()
        new = now[len(before) + self._told :]
        self._told += len(new)
        return new

    def _texts(self) -> tuple[str, str]:
        return self._tokenizer.decode(self._ids[self._start : self._read]), self._tokenizer.decode(
            self._ids[self._start :]
        )


class StopText:
    """Text up to the first of some strings. What may be the beginning of one waits."""

    def __init__(self, strings: Sequence[str]):
        self._strings, self._waiting = tuple(strings), ""
        self.found: str | None = None

    def push(self, text: str, heeded: bool = True) -> str:
        """The text that no stop string can hold any more; nothing after one is found. One completed while they are not
        heeded is text like any other."""
        if self.found is not None:
            return ""
        old, text = len(self._waiting), self._waiting + text
        found = lambda string: text.find(string, max(0, old - len(string) + 1))
        hits = [(at, -len(string), string) for string in self._strings if (at := found(string)) >= 0]
        if hits and heeded:
            at, _, self.found = min(hits)
            self._waiting = ""
            return text[:at]
        waiting = max((_overlap(text, string) for string in self._strings), default=0)
        self._waiting = text[len(text) - waiting :]
        return text[: len(text) - waiting]

    def rest(self) -> str:
        """What still waited when the text ended."""
        waiting, self._waiting = self._waiting, ""
        return waiting


def _overlap(text: str, string: str) -> int:
    """Characters at the end of the text that begin the string."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if string.startswith(text[len(text) - n :])), 0)
