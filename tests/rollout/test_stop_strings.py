"""Stop strings against a search of the text, over random tokens that cut the strings in every way."""

import numpy as np
import pytest

from jaxrl_post.rollout.stop_strings import MOST_STRINGS, compile_strings, completed_by_last, read

TOKENS = [
    b"",
    b"a",
    b"b",
    b"ab",
    b"aab",
    b"ba",
    b"\n",
    b"\n\n",
    b"b\n",
    b"\xc3",
    b"\xa9",
    b"\xc3\xa9a",
    b"\xe2\x82",
    b"x" * 9,
]
STRINGS = ("aab", "ab\n", "\n\n\n", "éa", "€", "aa", "bab")


def first_stop(parts, strings):
    """Number of tokens until the text holds a string, by searching all of it after each; 0 if it never does."""
    for n in range(1, len(parts) + 1):
        if any(s.encode() in b"".join(parts[:n]) for s in strings):
            return n
    return 0


def test_a_string_is_found_at_the_token_that_completes_it():
    automaton = compile_strings(STRINGS, TOKENS)
    rng = np.random.default_rng(0)
    token_RS = rng.integers(0, len(TOKENS), (40, 500))
    state_S, stops_S, seen = np.zeros(500, np.int32), np.zeros(500, int), set()
    for n, token_S in enumerate(token_RS, 1):
        state_S, completed_S = read(automaton, state_S, token_S)
        stops_S = np.where((stops_S == 0) & (completed_S != 0), n, stops_S)
    for s in range(500):
        parts = [TOKENS[i] for i in token_RS[:, s]]
        assert stops_S[s] == first_stop(parts, STRINGS)
        if stops_S[s]:
            string = completed_by_last(STRINGS, parts[: stops_S[s]])
            text = b"".join(parts[: stops_S[s]])
            assert string.encode() in text
            assert all(
                other.encode() not in text[: text.index(string.encode()) + len(string.encode()) - 1]
                for other in STRINGS
            )
            seen.add(string)
    assert seen >= {"aab", "ab\n", "\n\n\n", "éa", "bab"} - {"aab"} | {"aa"}


@pytest.mark.parametrize("only", range(len(STRINGS)))
def test_each_request_heeds_its_own_strings(only):
    automaton = compile_strings(STRINGS, TOKENS)
    token_RS = np.random.default_rng(only).integers(0, len(TOKENS), (30, 200))
    state_S, stops_S = np.zeros(200, np.int32), np.zeros(200, int)
    for n, token_S in enumerate(token_RS, 1):
        state_S, completed_S = read(automaton, state_S, token_S)
        stops_S = np.where((stops_S == 0) & (completed_S >> only & 1 == 1), n, stops_S)
    expected = [first_stop([TOKENS[i] for i in token_RS[:, s]], STRINGS[only : only + 1]) for s in range(200)]
    assert stops_S.tolist() == expected
    assert stops_S.any() or STRINGS[only] == "€"  # its last byte is in no token


def test_of_several_strings_the_first_to_end_is_told_and_the_longest_of_those():
    assert completed_by_last(("cd", "b", "ab"), [b"x", b"abcd"]) == "ab"
    assert completed_by_last(("aa",), [b"aa", b"a"]) == "aa"
    assert completed_by_last(("aa",), [b"aa", b"b"]) is None


def test_tokens_that_do_alike_share_a_column():
    words = [bytes([a, b]) for a in range(97, 117) for b in range(97, 117)]
    automaton = compile_strings(("\nEnd", "###"), [*words, b"#", b"\nE", b"nd"])
    assert len(set(automaton.class_V.tolist())) == 5  # "#", "\nE", "nd", words from d on, all others
    assert automaton.after_AC.shape == (8, 8)  # 1 + 4 + 3 states


def test_too_many_strings_are_refused():
    with pytest.raises(ValueError, match="33 stop strings: one rollout takes at most 32"):
        compile_strings([str(i) for i in range(MOST_STRINGS + 1)], TOKENS)
