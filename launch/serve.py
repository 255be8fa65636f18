"""`python -m launch serve CONFIG|RUN_DIR`: an OpenAI-compatible server of a model or of a run."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette

from jaxrl_post.loops.policy import Policy
from jaxrl_post.loops.run_folder import Which
from jaxrl_post.rollout.decoding import Decoding, check
from jaxrl_post.rollout.stepper import StepEngine
from jaxrl_post.serving.openai_api import Served
from jaxrl_post.serving.scheduler import Scheduler
from jaxrl_post.serving.server import application, listen, run
from launch.policy_source import own_decoding, read_policy
from sharding.mesh import batch_shards

KEY_VARIABLE = "JAXRL_POST_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclasses.dataclass(frozen=True)
class Asked:
    """What was typed. `seconds`: most time a request may take; `steps`: tokens a call of the engine."""

    host: str
    port: int
    key_file: Path | None
    name: str | None
    slots: int
    max_queue: int
    context: int
    steps: int
    seconds: float
    warm_up: bool


def serve(source: Path, overrides: Sequence[str], weights: Path | None, asked: Asked, which: Which = None) -> None:
    """Serve until SIGTERM or SIGINT; requests under way are answered first, then exit code 0. Sampling options that a
    request does not name are those of the recipe's rollout section, but for the number of tokens.

    Raises: ValueError for values that make no server, a port that cannot be had, and as `read_policy`.
    """
    _check_numbers(asked)
    key = read_key(asked.key_file)
    sock = listen(asked.host, asked.port)
    name = asked.name or source.stem
    app, origin = make_application(source, overrides, weights, asked, name, key, which)
    if key is None and asked.host not in LOOPBACK:
        print(f"warning: {asked.host} is open to other machines and no key is asked for", file=sys.stderr)
    host, port = sock.getsockname()[:2]
    print(f"{origin}: serving {name!r} on http://{host}:{port}/v1", file=sys.stderr, flush=True)
    # The server raises the signal it ended on again, when all is done: nothing is left to be ended then.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    run(app, sock)


def _check_numbers(asked: Asked) -> None:
    for flag, value, least in (
        ("--slots", asked.slots, 1),
        ("--context", asked.context, 2),
        ("--steps", asked.steps, 1),
        ("--max-queue", asked.max_queue, 0),
    ):
        if value < least:
            raise ValueError(f"{flag} {value}: expected {least} or more")
    if not asked.seconds > 0:
        raise ValueError(f"--timeout {asked.seconds:g}: expected more than 0 seconds")


def make_application(
    source: Path,
    overrides: Sequence[str],
    weights: Path | None,
    asked: Asked,
    name: str,
    key: str | None,
    which: Which = None,
) -> tuple[Starlette, str]:
    """The application, and where its weights come from. It holds them as the engine reads them and in no other way."""
    policy = read_policy(source, overrides, weights, which)
    own = Decoding(**own_decoding(policy))
    check(own, policy.network.model.vocab_size)
    served = Served(name, policy.tokenizer, _system_prompt(policy), asked.seconds, own)
    return application(served, make_scheduler(policy, asked, own), key), policy.source


def make_scheduler(policy: Policy, asked: Asked, own: Decoding) -> Scheduler:
    """`own`: how requests are decoded that say nothing."""
    network = policy.network
    shards = batch_shards(network.mesh)
    engine = StepEngine(
        network.graphdef, network.model, network.mesh, policy.stop_ids,
        slots=-(-asked.slots // shards) * shards, columns=min(asked.context, network.model.max_positions),
        steps=asked.steps,
    )  # fmt: skip
    warm_up = dataclasses.replace(own, stop=()) if asked.warm_up else None
    return Scheduler(engine, engine.load(policy.params), max_queue=asked.max_queue, warm_up=warm_up)


def read_key(file: Path | None) -> str | None:
    """From the file, or else the environment. Raises: ValueError for a file without a key."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    key = file.read_text(encoding="utf-8").strip()
    if not key:
        raise ValueError(f"--api-key-file {file} is empty")
    return key


def _system_prompt(policy: Policy) -> str | None:
    return policy.config.data.system_prompt if policy.config.data.chat else None
