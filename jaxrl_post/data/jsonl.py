"""JSON-lines files of prompts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_post import config

Row = dict[str, Any]
MAX_LINE = 1 << 26  # bytes; a file without line feeds is not read into memory whole


def read_rows(path: str | Path, task: config.JsonlTask, key: str = "data.task.path") -> tuple[list[Row], list[str]]:
    """The rows of a JSON-lines file, and `file:line: why` for each line skipped.

    Records end at line feeds alone, so U+2028 in a string is text; a byte-order mark, CRLF and blank lines are
    accepted. A row keeps its own fields and gets `prompt` (text) or `messages` (list of {"role", "content"}) and, if it
    has `task.answer_key`, `answer`. A line that is no such row raises ValueError, or is skipped with
    `task.on_bad_row="skip"`. ValueError, naming `key`, also if there is no such file or no row is left.
    """
    rows: list[Row] = []
    dropped: list[str] = []
    total = 0
    for number, text in _lines(Path(path), key):
        total += 1
        try:
            rows.append(_row(text, task))
        except (ValueError, RecursionError) as error:
            problem = f"{path}:{number}: {error}"
            if task.on_bad_row == "error":
                section = key.rpartition(".")[0]
                skip = f", or set {section}.on_bad_row=skip" if section else ""
                raise ValueError(f"{problem}. Mend the line{skip}") from error
            dropped.append(problem)
    if not rows:
        first = f" (first: {dropped[0]})" if dropped else ""
        raise ValueError(
            f"{key}={str(path)!r} has no rows: {total} read, {len(dropped)} dropped{first}. Give another file"
        )
    return rows, dropped


def _lines(path: Path, key: str) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and the bytes of each line that is not blank."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{key}={str(path)!r} {found}: give a file with one JSON object a line")
    with path.open("rb") as file:
        for number in itertools.count(1):
            try:
                line = file.readline(MAX_LINE + 1)
            except OSError as error:
                raise ValueError(f"{key}={str(path)!r} cannot be read ({error.strerror}): give another file") from error
            if len(line) > MAX_LINE:
                raise ValueError(f"{path}:{number}: longer than {MAX_LINE} bytes, and no row of prompts: {key}")
            if not line:
                return
            if line.removeprefix(b"\xef\xbb\xbf").strip():
                yield number, line


def _row(line: bytes, task: config.JsonlTask) -> Row:
    fields = json.loads(line.decode("utf-8-sig"))
    if not isinstance(fields, dict):
        raise ValueError(f"a {type(fields).__name__}, not a JSON object")
    if b"\\ud" in line.lower():  # half a surrogate pair is no text, and no tokenizer takes it
        json.dumps(fields, ensure_ascii=False).encode("utf-8")
    row = {k: v for k, v in fields.items() if k not in ("prompt", "messages", "answer")}
    if task.answer_key in fields:
        row["answer"] = fields[task.answer_key]
    return row | _question(fields, task.prompt_key)


def _question(fields: Row, prompt_key: str) -> Row:
    value = fields.get("messages") if fields.get(prompt_key) is None else fields[prompt_key]
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return {"messages": value}
    if value is None:
        raise ValueError(f"has neither {prompt_key!r} (data.task.prompt_key) nor 'messages'; keys: {sorted(fields)}")
    raise ValueError(
        "the prompt must be text or a non-empty list of messages {'role': text, 'content': text}, "
        f"not {json.dumps(value, ensure_ascii=False)[:80]}"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
