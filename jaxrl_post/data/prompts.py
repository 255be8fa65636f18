"""From rows to tokenised prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxrl_post import config
from jaxrl_post.config_offline import OfflineData
from jaxrl_post.data.chat_template import Message
from jaxrl_post.data.jsonl import Row
from jaxrl_post.data.stream import Stream
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.types import Prompt


@dataclasses.dataclass(frozen=True)
class Report:
    """What `prepare` did: rows read, prompts kept, rows dropped for their length; lengths are in tokens."""

    rows: int
    kept: int
    too_long: int
    limit: int
    shortest: int
    longest: int


def prepare(
    rows: Iterable[Row], tokenizer: Tokenizer, data: config.Data, source: str = "data.task"
) -> tuple[list[Prompt], Report]:
    """Tokenises rows and drops those over `data.max_prompt_tokens`.

    With `data.chat` a text prompt becomes one user turn of the chat template, after `data.system_prompt` if there is
    one; a conversation with a system turn of its own keeps that. Without, text is fed as it is, after BOS if the
    tokenizer's files ask for it. A prompt of no tokens acts as [BOS].
    Raises ValueError naming `source` and the row: no rows, a row that cannot be tokenised or has neither tokens nor a
    BOS to stand for them, and when every prompt is too long.
    """
    if data.system_prompt is not None and not data.chat:
        raise ValueError("data.system_prompt needs a chat template: set data.chat=true, or put it into the prompts")
    prompts = [prompt_of(row, tokenizer, data, f"{source}, row {number}") for number, row in enumerate(rows)]
    if not prompts:
        raise ValueError(f"{source} has no rows: 0 read, 0 dropped. Give a task with rows")
    kept = [prompt for prompt in prompts if len(prompt.ids) <= data.max_prompt_tokens]
    lengths = [len(prompt.ids) for prompt in prompts]
    dropped = len(prompts) - len(kept)
    if not kept:
        raise ValueError(
            f"{source}: {len(prompts)} rows read, {dropped} dropped as longer than data.max_prompt_tokens="
            f"{data.max_prompt_tokens}, none left; the shortest has {min(lengths)} tokens: raise data.max_prompt_tokens"
        )
    return kept, Report(len(prompts), len(kept), dropped, data.max_prompt_tokens, min(lengths), max(lengths))


def prompt_of(row: Row, tokenizer: Tokenizer, data: config.Data | OfflineData, where: str) -> Prompt:
    """The row tokenised. Raises: ValueError, beginning with `where`."""
    try:
        text = tokenizer.render_chat(_messages(row, data.system_prompt)) if data.chat else _plain_text(row)
        ids = tokenizer.encode(text, add_bos=not data.chat and tokenizer.adds_bos)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
    if not ids and tokenizer.bos_id is None:
        raise ValueError(f"{where}: the prompt has no tokens and the tokenizer no BOS to stand for it: remove the row")
    return Prompt(tuple(ids) or (tokenizer.bos_id,), text, row)  # type: ignore[arg-type]


def _messages(row: Row, system_prompt: str | None) -> list[Message]:
    messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _plain_text(row: Row) -> str:
    if "messages" in row:
        raise ValueError("`messages` need a chat template: set data.chat=true, or give the row a text prompt")
    return row["prompt"]


PromptStream = Stream[Prompt]
