"""What a program is tested by, and what it may take."""

from __future__ import annotations

from typing import NamedTuple

MOST_PRINTED = 1 << 20  # bytes a program may print


class Case(NamedTuple):
    """Python that must run after the program without an error; or what it must print, given something to read."""

    after: str | None = None
    given: str = ""
    printed: str = ""

    def printed_right(self, text: str) -> bool:
        """Compared without white space at the ends of lines and of the whole."""
        return _lines(text) == _lines(self.printed)


class Limits(NamedTuple):
    seconds: float
    memory: int  # bytes


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
