"""How wide the host-driven engine's programs are: powers of two, so that lengths of all kinds share a few compiles."""

from __future__ import annotations

from collections.abc import Iterator

SHORTEST_PIECE = 8
FEWEST_COLUMNS = 64


def bucket(count: int) -> int:
    """The next power of two, at least SHORTEST_PIECE."""
    return max(SHORTEST_PIECE, 1 << max(count - 1, 0).bit_length())


def prefix_columns(tokens: int, columns: int) -> int:
    """Columns of a prompt's own cache, which never holds its last token."""
    return min(bucket(tokens - 1), columns)


def piece_size(tokens: int, room: int, most: int) -> int:
    """Columns of the next piece of so many tokens; never more than the room."""
    size = min(bucket(tokens), most)
    return size if size <= room else 1 << (min(tokens, room).bit_length() - 1)


def decode_columns(longest: int, steps: int, columns: int) -> int:
    """Columns that a call of `steps` steps reads, the longest sequence having so many at its start."""
    return min(max(FEWEST_COLUMNS, bucket(longest + steps)), columns)


def lengths_of_every_width(columns: int, piece: int, steps: int) -> Iterator[int]:
    """Prompt lengths, rising, that between them run each program: prefill, insert and decode of every width."""
    seen: set[tuple[int, int]] = set()
    for tokens in range(1, columns):
        width = prefix_columns(tokens, columns)
        used = {(width, size) for size in _pieces(tokens - 1, width, piece)}
        used |= {(width, 0), (0, decode_columns(tokens - 1, steps, columns))}
        if not used <= seen:
            seen |= used
            yield tokens


def _pieces(tokens: int, room: int, most: int) -> Iterator[int]:
    while tokens > 0:
        size = piece_size(tokens, room, most)
        yield size
        tokens, room = tokens - size, room - size
