"""Small rewards on the text alone, as examples for `reward.kind: function`."""

from __future__ import annotations

from typing import Any


def digit_fraction(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """The share of a completion's characters that are digits 0-9; 0 for an empty one."""
    return [sum(c in "0123456789" for c in text) / max(len(text), 1) for text in completions]


def distinct_fraction(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """How many of a completion's characters occur in it only once, as a share; 0 for an empty one."""
    return [sum(text.count(c) == 1 for c in text) / max(len(text), 1) for text in completions]
