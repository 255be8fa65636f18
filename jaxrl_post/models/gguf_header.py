"""A look through the header of a GGUF file before the package `gguf` reads it, which trusts its counts and offsets.

GGUF 2 and 3, little-endian (specified in docs/gguf.md of ggml). Every length is held against what is left of the
file before anything of that length is made.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MAGIC, VERSIONS = b"GGUF", (2, 3)
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of the scalar types
UINT32, STRING, ARRAY = 4, 8, 9
DEFAULT_ALIGNMENT = 32
MOST = {"metadata fields": 1 << 16, "tensors": 1 << 16, "array elements": 1 << 22, "dimensions": 4}
LONGEST_NAME = (1 << 16) - 1  # bytes

BlockSizes = Mapping[int, tuple[int, int]]  # of a tensor type: values a block, bytes a block


class _Span(NamedTuple):
    start: int
    end: int
    name: str


def check_header(path: Path, blocks: BlockSizes) -> None:
    """Raises: ValueError for what lies outside the file or over another tensor, comes twice, or is too much to be a
    model's."""
    if path.stat().st_size < len(MAGIC):
        raise ValueError("no GGUF magic at its start")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _check(_Cursor(data), blocks)


class _Cursor:
    """Reads on from where it is."""

    def __init__(self, data: mmap.mmap):
        self._data, self.at, self.size = data, 0, len(data)

    def take(self, size: int, what: str) -> bytes:
        self.skip(size, what)
        return self._data[self.at - size : self.at]

    def skip(self, size: int, what: str) -> None:
        if size > self.size - self.at:
            raise ValueError(f"{what} at byte {self.at} takes {size} bytes and {self.size - self.at} are left")
        self.at += size

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def count(self, what: str, number: int) -> int:
        if number > MOST[what]:
            raise ValueError(f"{number} {what}, more than the {MOST[what]} a model may have")
        return number

    def name(self, what: str) -> str:
        size = self.u64(what)
        if size > LONGEST_NAME:
            raise ValueError(f"{what} at byte {self.at} has {size} bytes, more than {LONGEST_NAME}")
        return self.take(size, what).decode("utf-8")


def _check(cursor: _Cursor, blocks: BlockSizes) -> None:
    if cursor.take(4, "the magic") != MAGIC:
        raise ValueError("no GGUF magic at its start")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        raise ValueError(f"version {version}, not one of {VERSIONS} (little-endian)")
    tensors = cursor.count("tensors", cursor.u64("the tensor count"))
    fields = cursor.count("metadata fields", cursor.u64("the field count"))
    alignment = _fields(cursor, fields)
    spans = [_tensor(cursor, blocks, alignment) for _ in range(tensors)]
    start = -(-cursor.at // alignment) * alignment
    _check_spans(spans, cursor.size - start)


def _fields(cursor: _Cursor, count: int) -> int:
    """The alignment that the metadata state, once all of them are known to be in the file."""
    alignment, elements, seen = DEFAULT_ALIGNMENT, 0, set()
    for _ in range(count):
        key = cursor.name("a metadata key")
        if key in seen:
            raise ValueError(f"metadata key {key!r} comes twice")
        seen.add(key)
        kind = cursor.u32(f"the type of {key!r}")
        if key == "general.alignment" and kind == UINT32:
            alignment = cursor.u32(key)
        else:
            elements = cursor.count("array elements", elements + _value(cursor, key, kind))
    if alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise ValueError(f"general.alignment={alignment} is no power of two up to 2^20")
    return alignment


def _value(cursor: _Cursor, key: str, kind: int) -> int:
    """Skip one; how many elements it has, 0 for one that is no array."""
    if kind == STRING:
        cursor.skip(cursor.u64(key), f"text of {key!r}")
        return 0
    if kind in WIDTHS:
        cursor.skip(WIDTHS[kind], f"value of {key!r}")
        return 0
    if kind != ARRAY:
        raise ValueError(f"metadata {key!r} has the unknown type {kind}")
    element, count = cursor.u32(key), cursor.u64(key)
    cursor.count("array elements", count)
    if element in WIDTHS:
        cursor.skip(WIDTHS[element] * count, f"array of {key!r}")
    elif element == STRING:
        for _ in range(count):
            cursor.skip(cursor.u64(key), f"text in {key!r}")
    else:
        raise ValueError(f"metadata {key!r} is an array of type {element}: only scalars and text are read")
    return count


def _tensor(cursor: _Cursor, blocks: BlockSizes, alignment: int) -> _Span:
    """Where its data are, from the start of all data."""
    name = cursor.name("a tensor's name")
    count = cursor.count("dimensions", cursor.u32(name))
    shape = [cursor.u64(name) for _ in range(count)]
    kind, offset = cursor.u32(name), cursor.u64(name)
    if kind not in blocks:
        raise ValueError(f"tensor {name!r} has the unknown type {kind}")
    values, size = blocks[kind]
    if not shape or 0 in shape or shape[0] % values:
        raise ValueError(f"tensor {name!r} of shape {shape} cannot be cut into blocks of {values}")
    if offset % alignment:
        raise ValueError(f"tensor {name!r} begins at {offset}, no multiple of the alignment {alignment}")
    total = size * (shape[0] // values)
    for dimension in shape[1:]:
        total *= dimension
    return _Span(offset, offset + total, name)


def _check_spans(spans: list[_Span], size: int) -> None:
    names = [span.name for span in spans]
    if len(set(names)) < len(names):
        raise ValueError(f"tensor {next(name for name in names if names.count(name) > 1)!r} comes twice")
    spans = sorted(spans)
    for span in spans:
        if span.end > size:
            raise ValueError(f"tensor {span.name!r} ends at byte {span.end} of {size} there are")
    for before, after in itertools.pairwise(spans):
        if before.end > after.start:
            raise ValueError(f"tensors {before.name!r} and {after.name!r} overlap")
