"""Stop strings, found in the graph wherever tokens cut them: an automaton over token ids, made on the host.

Aho and Corasick's automaton (1975) of the strings reads bytes; run over the bytes of a token it goes from each state
to one other, and completes some strings on the way. Nearly all tokens do the same from every state, so tokens are put
into classes and the table is one of states × classes: for four strings of 12 characters over 49,152 tokens some 50 kB
beside the class of each token. It is exact where text is the bytes of its tokens, one after the other.

A states, V vocabulary, C classes, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MOST_STRINGS = 32
CHUNK = 4096


class Automaton(NamedTuple):
    """State 0 has seen nothing. class_V int32 [V]; after_AC int32 [A, C], the state after a token of the class;
    completed_AC uint32 [A, C], a bit for each string completed within it."""

    class_V: Any
    after_AC: Any
    completed_AC: Any


def read(automaton: Automaton, state_S: jax.Array, token_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The states after one more token each, int32 [S], and the strings it completes, uint32 [S]."""
    class_V, after_AC, completed_AC = jax.tree.map(jnp.asarray, tuple(automaton))
    class_S = class_V[token_S]
    return after_AC[state_S, class_S], completed_AC[state_S, class_S]


def bytes_of_all(token_bytes: Sequence[bytes], vocab_size: int) -> list[bytes]:
    """The bytes of each of the model's ids; those beyond the tokenizer's spell nothing. Empty where none are told."""
    beyond = vocab_size - len(token_bytes)
    return [*token_bytes[:vocab_size], *([b""] * beyond)] if token_bytes else []


def compile_strings(strings: Sequence[str], token_bytes: Sequence[bytes]) -> Automaton:
    """The automaton of at most 32 strings over V tokens of these bytes; A and C are padded to powers of two, so that
    other strings seldom mean another compile."""
    if len(strings) > MOST_STRINGS:
        raise ValueError(f"{len(strings)} stop strings: one rollout takes at most {MOST_STRINGS} different ones")
    next_AX, ends_A = _byte_automaton([s.encode() for s in strings])
    class_V = np.zeros(len(token_bytes), np.int32)
    known: dict[bytes, int] = {}
    columns: list[np.ndarray] = []
    for start in range(0, len(token_bytes), CHUNK):
        column_VA = _run(next_AX, ends_A, token_bytes[start : start + CHUNK])
        for i, column_A in enumerate(column_VA):
            key = column_A.tobytes()
            if key not in known:
                known[key] = len(columns)
                columns.append(column_A)
            class_V[start + i] = known[key]
    after_AC, completed_AC = (np.stack([column[name] for column in columns], 1) for name in ("after", "completed"))
    pad = [(0, _power_of_two(n) - n) for n in after_AC.shape]
    return Automaton(class_V, np.pad(after_AC, pad), np.pad(completed_AC, pad))


def completed_by_last(strings: Sequence[str], parts: Sequence[bytes]) -> str | None:
    """The string that the last token's bytes complete first; the longest of several that end together."""
    text = b"".join(parts)
    old, found = len(text) - len(parts[-1]), []
    for string in strings:
        spelt = string.encode()
        at = text.find(spelt, max(0, old - len(spelt) + 1))
        if at >= 0:
            found.append((at + len(spelt), -len(spelt), string))
    return min(found)[2] if found else None


def _byte_automaton(patterns: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Next state int32 [A, 256], and the patterns (a bit each) that end in a state, uint32 [A]."""
    children: list[dict[int, int]] = [{}]
    ends = [0]
    for i, pattern in enumerate(patterns):
        node = 0
        for byte in pattern:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                ends.append(0)
            node = children[node][byte]
        ends[node] |= 1 << i
    next_AX, fail = np.zeros((len(children), 256), np.int32), [0] * len(children)
    queue = [0]
    for node in queue:
        next_AX[node] = next_AX[fail[node]]
        for byte, child in children[node].items():
            fail[child] = int(next_AX[node, byte])  # where the longest proper suffix leads
            ends[child] |= ends[fail[child]]
            next_AX[node, byte] = child
            queue.append(child)
    return next_AX, np.array(ends, np.uint32)


def _run(next_AX: np.ndarray, ends_A: np.ndarray, token_bytes: Sequence[bytes]) -> np.ndarray:
    """What each token does from each state: records (after, completed) [V, A]."""
    A, V = len(ends_A), len(token_bytes)
    out = np.zeros((V, A), [("after", np.int32), ("completed", np.uint32)])
    out["after"] = np.arange(A)
    longest_first = sorted(range(V), key=lambda i: -len(token_bytes[i]))
    for j in range(len(token_bytes[longest_first[0]])):
        live = [i for i in longest_first if len(token_bytes[i]) > j]
        byte_V1 = np.array([token_bytes[i][j] for i in live])[:, None]
        after_VA = next_AX[out["after"][live], byte_V1]
        out["after"][live] = after_VA
        out["completed"][live] |= ends_A[after_VA]
        longest_first = live
    return out


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
