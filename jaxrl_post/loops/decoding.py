"""How a run's samples are decoded, and what their text is."""

from __future__ import annotations

from typing import Any

from jaxrl_post.config import Config
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.rollout.parts import Finished
from jaxrl_post.types import Completion

UNREADABLE = "\ufffd"


def decoding(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the recipe says of every request, as `rollout.decoding.Decoding` takes it."""
    options = config.rollout
    return {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "min_tokens": options.min_tokens,
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "logit_bias": tuple(options.logit_bias.items()),
        "bad_words": bad_word_ids(options.bad_words, tokenizer),
        "stop": options.stop,
    }


def greedy_decoding(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """The same without chance: penalties, bans and stops stay."""
    return decoding(config, tokenizer) | {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def bad_word_ids(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelt at the start of a line and after another word."""
    spelt = (tuple(tokenizer.encode(space + word.lstrip())) for word in words for space in ("", " "))
    return tuple(dict.fromkeys(spelt))


def text_of(completion: Completion | Finished, tokenizer: Tokenizer, with_stop_string: bool) -> str:
    """The completion's text without special tokens; up to the stop string, or with it."""
    text, string = tokenizer.decode(completion.ids), completion.stop_string
    if string is None:
        return text
    # The match ends in the last token. Half a character before it is unreadable, and no part of a match.
    before = tokenizer.decode(completion.ids[:-1]).rstrip(UNREADABLE)
    begin = text.index(string, max(0, len(before) - len(string) + 1))
    return text[: begin + len(string) if with_stop_string else begin]
