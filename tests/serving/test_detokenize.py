"""Text in pieces is the text; half a character never shows; stop strings are found across pieces."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.data.tokenizer import ByteTokenizer
from jaxrl_post.serving.detokenize import Detokenizer, StopText

BYTES = ByteTokenizer()


def pieces(ids, size=1):
    text = Detokenizer(BYTES)
    return [text.push(ids[i : i + size]) for i in range(0, len(ids), size)], text.rest()


@given(st.lists(st.integers(0, 260), max_size=40), st.integers(1, 5))
def test_pieces_of_any_bytes_add_up_to_the_text(ids, size):
    told, rest = pieces(ids, size)
    assert "".join(told) + rest == BYTES.decode(ids)


@given(st.text(max_size=20), st.integers(1, 5))
def test_valid_text_never_shows_half_a_character(text, size):
    told, rest = pieces(list(text.encode()), size)
    assert "".join(told) + rest == text
    assert all("\ufffd" not in piece for piece in told) or "\ufffd" in text


def test_a_character_is_told_with_its_last_byte_and_not_before():
    told, rest = pieces(list("a😀é".encode()))
    assert told == ["a", "", "", "", "😀", "", "é"]
    assert rest == ""


def test_what_never_became_a_character_is_told_at_the_end():
    told, rest = pieces([97, 0xF0, 0x9F])
    assert (told, rest) == (["a", "", ""], "\ufffd")


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.integers(1, 4))
def test_text_ends_before_the_first_stop_string_wherever_pieces_cut(text, strings, size):
    stop, told = StopText(strings), ""
    for i in range(0, len(text), size):
        told += stop.push(text[i : i + size])
        assert not any(string in told for string in strings)
    told += stop.rest()
    ends = [m.start() for string in strings if (m := re.search(re.escape(string), text))]
    # In pieces the string that is complete first ends the text, so compare with what was read until then.
    if stop.found is None:
        assert (told, ends) == (text, [])
    else:
        read = next(n for n in range(len(text) + 1) if any(s in text[: -(-n // size) * size] for s in strings))
        seen = text[: -(-read // size) * size]
        assert told == seen[: min(seen.find(s) for s in strings if s in seen)]


def test_a_string_completed_before_it_is_heeded_is_text():
    stop = StopText(["ab", "abc"])
    told = [stop.push("a", heeded=False), stop.push("b", heeded=False), stop.push("x"), stop.push("a"), stop.push("bc")]
    assert (told, stop.found) == (["", "", "abx", "", ""], "abc")


@pytest.mark.parametrize(("text", "told"), [("xab", "x"), ("xa", "xa"), ("xaab", "xa")])
def test_a_beginning_waits_until_it_is_decided(text, told):
    stop = StopText(["ab"])
    assert "".join(stop.push(char) for char in text) + stop.rest() == told
