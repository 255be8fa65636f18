"""`python -m launch sample CONFIG|RUN_DIR`: text to the terminal as it is sampled, or JSON lines for many prompts."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxrl_post.config import Config, JsonlTask
from jaxrl_post.data.jsonl import Row, read_rows
from jaxrl_post.data.prompts import prompt_of
from jaxrl_post.loops.decoding import text_of
from jaxrl_post.loops.policy import Policy
from jaxrl_post.loops.run_folder import Which
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.schedule import SampleOptions
from jaxrl_post.rollout.step_records import Burst, Request
from jaxrl_post.rollout.stepper import StepEngine
from jaxrl_post.serving.answer import SampleText
from jaxrl_post.types import Completion, Prompt, StopReason
from launch.policy_source import own_decoding, read_policy
from sharding.mesh import batch_shards

DEFAULT_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Asked:
    """What was typed; None leaves it to the recipe's rollout section, where it has one."""

    prompts: Sequence[str]
    file: Path | None
    samples: int
    max_tokens: int | None
    temperature: float | None
    stream: bool
    to: Path | None


def sample(source: Path, overrides: Sequence[str], weights: Path | None, asked: Asked, which: Which = None) -> None:
    """Stream the one sample of one prompt, or write JSON lines {prompt, completion, ids, logp, stop}, to `to` or to
    standard output.

    Raises: ValueError for no prompt, for a stream of several samples, and as `read_policy` and `Sampler.generate`.
    """
    _check_numbers(asked)
    rows = _rows(asked)
    single = len(rows) * asked.samples == 1
    if asked.stream and not single:
        raise ValueError(f"--stream shows one sample, not {len(rows)} prompts × {asked.samples}: leave it out")
    policy = read_policy(source, overrides, weights, which)
    prompts = [prompt_of(row, policy.tokenizer, policy.config.data, f"prompt {i}") for i, row in enumerate(rows)]
    print(f"{policy.source}: {len(prompts)} prompts × {asked.samples}", file=sys.stderr, flush=True)
    options = _options(policy, asked)
    if asked.stream or (single and asked.to is None):
        completions = [_stream(policy, prompts[0], options, sys.stdout)]
    else:
        completions = _batch(policy, prompts, options)
    if asked.to is not None:
        with asked.to.open("w", encoding="utf-8") as file:
            _write(policy, rows, completions, file)
    elif not single:
        _write(policy, rows, completions, sys.stdout)


def _rows(asked: Asked) -> list[Row]:
    rows: list[Row] = [{"prompt": text} for text in asked.prompts]
    if asked.file is not None:
        rows += read_rows(asked.file, JsonlTask(kind="jsonl", path=str(asked.file)), "--file")[0]
    if not rows:
        raise ValueError("give --prompt TEXT or --file prompts.jsonl")
    return rows


def _check_numbers(asked: Asked) -> None:
    for flag, value, least in (
        ("--samples", asked.samples, 1),
        ("--max-tokens", asked.max_tokens, 1),
        ("--temperature", asked.temperature, 0),
    ):
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{flag} {value}: expected {least} or more")


def _options(policy: Policy, asked: Asked) -> SampleOptions:
    """The recipe's rollout section, as training samples; what was typed goes before."""
    own: dict[str, Any] = {"max_new_tokens": DEFAULT_TOKENS}
    if isinstance(policy.config, Config):
        rollout = policy.config.rollout
        own = own_decoding(policy) | {"max_new_tokens": rollout.max_new_tokens, "slots": rollout.slots}
    typed = {"max_new_tokens": asked.max_tokens, "temperature": asked.temperature, "samples_per_prompt": asked.samples}
    return SampleOptions(**(own | {key: value for key, value in typed.items() if value is not None}))


def _batch(policy: Policy, prompts: Sequence[Prompt], options: SampleOptions) -> list[Completion]:
    network = policy.network
    token_bytes = policy.tokenizer.token_bytes() if options.stop else ()
    sampler = Sampler(network.graphdef, network.model, network.mesh, policy.stop_ids, token_bytes)
    ids = [prompt.ids for prompt in prompts]
    return sampler.generate(policy.params, ids, options, seed=policy.config.seed, step=0).completions


def _stream(policy: Policy, prompt: Prompt, options: SampleOptions, out: IO[str]) -> Completion:
    """Sample with the host-driven engine and write text as it comes; the ids are those of a batch of one."""
    network, ids, limit = policy.network, prompt.ids, options.max_new_tokens
    engine = StepEngine(
        network.graphdef, network.model, network.mesh, policy.stop_ids,
        slots=batch_shards(network.mesh), columns=len(ids) + limit,
        token_bytes=policy.tokenizer.token_bytes() if options.stop else (),
    )  # fmt: skip
    weights, text = engine.load(policy.params), SampleText(policy.tokenizer, options.stop, options.min_tokens)
    request = Request(limit, options, seed=policy.config.seed)
    engine.insert(engine.prefill(weights, ids), 0, request)
    bursts: list[Burst] = []
    while not bursts or bursts[-1].stop is None:
        bursts.append(engine.generate(weights)[0])
        print(text.take(bursts[-1]).text, end="", file=out, flush=True)
    print(file=out, flush=True)
    joined = lambda name: np.concatenate([getattr(burst, name) for burst in bursts])
    last = bursts[-1]
    reason = last.stop or StopReason.LENGTH
    return Completion(0, joined("ids"), joined("logp"), joined("raw_logp"), reason, last.stop_string)


def _write(policy: Policy, rows: Sequence[Row], completions: Sequence[Completion], file: IO[str]) -> None:
    for completion in completions:
        row = rows[completion.prompt]
        line: dict[str, Any] = {
            "prompt": row.get("prompt", row.get("messages")),
            "completion": text_of(completion, policy.tokenizer, with_stop_string=False),
            "ids": completion.ids.tolist(),
            "logp": completion.logp.tolist(),
            "stop": completion.stop.name.lower(),
        }
        print(json.dumps(line, ensure_ascii=False), file=file)
