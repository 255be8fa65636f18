"""Rewards that compare a completion with the row's `answer`."""

from __future__ import annotations

import re
from typing import Any

# A minus right after a letter, digit or closing bracket is an operator: "10-7" ends in 7, "= -7" in -7.
_INTEGER = re.compile(r"((?<![\w)\]])[-\u2212])?([0-9]+)")


def last_integer(text: str) -> str | None:
    """The last run of digits, with its sign and without leading zeros; None if there is none.

    A sign is "-" or "−" directly before the digits and not directly after a letter, digit or closing bracket.
    Only integers are known: "1,234" ends in 234 and "2.50" in 50.
    """
    found = _INTEGER.findall(text)
    return _canonical(*found[-1]) if found else None


def _canonical(sign: str, digits: str) -> str:
    """Compared as text, for a completion may hold more digits than Python turns into an int."""
    digits = digits.lstrip("0") or "0"
    return f"-{digits}" if sign and digits != "0" else digits


def last_number(completion: str, row: dict[str, Any]) -> float:
    """1.0 if the last integer of the completion (see `last_integer`) equals the answer."""
    return float(last_integer(completion) == last_integer(str(row["answer"])))


def exact_match(completion: str, row: dict[str, Any]) -> float:
    """1.0 if completion and answer are the same text but for white space around them."""
    return float(completion.strip() == str(row["answer"]).strip())


def check_answer(row: dict[str, Any]) -> None:
    """Raises ValueError unless the row has an `answer` of text or a number."""
    if "answer" not in row:
        raise ValueError(f"has no `answer` (data.task.answer_key); its keys are {sorted(row)}")
    answer = row["answer"]
    if not isinstance(answer, str | int | float) or isinstance(answer, bool) or answer != answer:  # NaN is no number
        raise ValueError(f"has answer={answer!r}, which is neither text nor a number")


def check_integer_answer(row: dict[str, Any]) -> None:
    """Raises ValueError unless the row's `answer` is one integer."""
    check_answer(row)
    if not re.fullmatch(r"[-\u2212]?[0-9]+", str(row["answer"]).strip()):
        raise ValueError(
            f"has answer={row['answer']!r}, which is not an integer; use another reward.kind for such rows"
        )
