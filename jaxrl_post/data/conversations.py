"""Conversations as tokens, with which of them the assistant says."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_post.config_offline import OfflineData
from jaxrl_post.data.chat_template import Message
from jaxrl_post.data.jsonl import Row
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.types_offline import Answer, Example


def conversation(row: Row, tokenizer: Tokenizer, data: OfflineData) -> Example:
    """A row for fine-tuning: {messages} with every assistant turn learned, or {prompt, completion}.

    Raises: ValueError when there is nothing to learn, or as `prompt_and_answer` and `split_turns`.
    """
    if "completion" in row:
        prompt, answer = prompt_and_answer(row, row["completion"], tokenizer, data)
        return Example(prompt, (answer,))
    if "messages" not in row or not data.chat:
        raise ValueError("needs `prompt` and `completion`, or `messages` with data.chat=true")
    return split_turns(with_system(row["messages"], data.system_prompt), tokenizer)


def split_turns(messages: Sequence[Message], tokenizer: Tokenizer) -> Example:
    """The conversation cut before the first assistant turn; learned are all tokens of assistant turns, end included.

    An assistant turn is what the whole conversation adds to the turns before it, as the template renders them. Where
    the template puts more after the turn's end token (a line break), that is context only. A last turn that the
    template ends without an end token gets one, as nothing else would stop a sampler.
    Raises: ValueError when there is no assistant turn, and when the tokens of an earlier part are not the first
    tokens of the whole, as with templates that rewrite earlier turns.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError("no message has role assistant, so there is nothing to learn")
    messages = list(messages[: turns[-1] + 1])
    ids = tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=False))
    trained = [False] * len(ids)
    for i in turns:
        begin = _prefix_length(tokenizer, messages[:i], True, ids, i)
        end = _prefix_length(tokenizer, messages[: i + 1], False, ids, i)
        stops = [at for at in range(begin, end) if ids[at] in tokenizer.stop_ids]
        end = stops[-1] + 1 if stops else end
        trained[begin:end] = [True] * (end - begin)
    last = len(trained) - trained[::-1].index(True) if any(trained) else 0
    ids, trained = with_end(ids[:last], tokenizer), trained[:last]
    trained += [True] * (len(ids) - last)
    first = trained.index(True) if any(trained) else 0
    if first == 0:
        raise ValueError("the first assistant turn has no token, or none before it that could predict it")
    return Example(tuple(ids[:first]), (Answer(tuple(ids[first:]), tuple(trained[first:])),))


def prompt_and_answer(
    row: Row, answer: str | list[Message], tokenizer: Tokenizer, data: OfflineData
) -> tuple[tuple[int, ...], Answer]:
    """A row's prompt and one answer to it (text or a single assistant message), all of it learned, end included.

    Raises: ValueError for an answer that is neither, an empty prompt, or as `split_turns`.
    """
    text = _answer_text(answer)
    if data.chat:
        asked = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
        asked = with_system(asked, data.system_prompt)
        whole = split_turns([*asked, {"role": "assistant", "content": text}], tokenizer)
        prompt = tuple(tokenizer.encode_chat(list(asked)))
        ids = (*whole.prompt_ids, *whole.answers[0].ids)[len(prompt) :]
    else:
        if "prompt" not in row:
            raise ValueError("`messages` need a chat template: set data.chat=true, or give the row a text prompt")
        prompt = tuple(tokenizer.encode(row["prompt"], add_bos=tokenizer.adds_bos))
        prompt = prompt or ((tokenizer.bos_id,) if tokenizer.bos_id is not None else ())
        ids = tuple(with_end(tokenizer.encode(text), tokenizer))
    if not prompt:
        raise ValueError("the prompt has no tokens and the tokenizer no BOS to stand for it")
    return prompt, Answer(ids, (True,) * len(ids))


def with_system(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """The messages after the system prompt; those with a system turn of their own keep it."""
    if system_prompt is None or messages[0]["role"] == "system":
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def with_end(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The ids, ending in an end token: the lowest stop id where there was none (models list the general one first)."""
    if not tokenizer.stop_ids or (ids and ids[-1] in tokenizer.stop_ids):
        return list(ids)
    return [*ids, min(tokenizer.stop_ids)]


def _answer_text(answer: str | list[Message]) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        message = answer[0]
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            return message["content"]
    raise ValueError(f"an answer is text or a list of one assistant message, not {str(answer)[:80]!r}")


def _prefix_length(
    tokenizer: Tokenizer, messages: Sequence[Message], generation: bool, whole: Sequence[int], turn: int
) -> int:
    part = tokenizer.encode(tokenizer.render_chat(list(messages), add_generation_prompt=generation))
    if list(whole[: len(part)]) != part:
        raise ValueError(
            f"the chat template renders the conversation up to message {turn} (assistant) differently once more "
            "follows, so its tokens cannot be found in the whole: give that turn a row of its own ({prompt, "
            "completion}), or use a template that leaves earlier turns alone"
        )
    return len(part)
