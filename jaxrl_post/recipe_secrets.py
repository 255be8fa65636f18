"""Secrets have no place in a recipe, which is kept in RUN_DIR/config.yaml, printed and logged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_post.yaml12 import Keys

HIDDEN = "…"
REFERENCE = "env:"  # begins the name of a variable that code of the user's own reads
# Whole words: `token` is a secret, `max_new_tokens` and `stop_token_ids` are not.
_NAMES = r"(?:^|[^a-z])(?:api_?key|access_?key|private_?key|secret(?:_key)?|passw(?:or)?d|credentials?|bearer|token)"
_SECRET_KEY = re.compile(f"{_NAMES}$", re.IGNORECASE)
_SECRET_INSIDE = re.compile(rf"({_NAMES}[\"']?\s*:\s*)[^,}}\s]+", re.IGNORECASE)
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]+(?=@)")


def secret_at(tree: Any, keys: Keys = ()) -> Iterator[Keys]:
    """The dotted keys whose values are secrets by their name, or addresses with a password."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from secret_at(value, (*keys, key))
    elif isinstance(tree, list):
        for value in tree:
            yield from secret_at(value, keys)
    elif isinstance(tree, str) and not tree.startswith(REFERENCE) and (_named(keys) or _LOGIN_IN_URL.search(tree)):
        yield keys


def without_secret(override: str) -> str:
    """`key=value` for a message, its value hidden where it may be a secret."""
    key, equals, value = override.partition("=")
    if _SECRET_KEY.search(key):
        return f"{key}{equals}{HIDDEN}"
    return key + equals + _SECRET_INSIDE.sub(rf"\1{HIDDEN}", _LOGIN_IN_URL.sub(HIDDEN, value))


def refusal(found: Sequence[Keys]) -> str:
    """What to say of the keys, without their values."""
    names = ", ".join(".".join(keys) for keys in found)
    return (
        f"{names}: holds what looks like a secret, and recipes are kept and logged; its value is not shown. Let your "
        f'code read an environment variable, whose name may stand here as "{REFERENCE}NAME"'
    )


def _named(keys: Keys) -> bool:
    return bool(keys) and bool(_SECRET_KEY.search(keys[-1]))
