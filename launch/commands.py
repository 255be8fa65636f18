"""The commands beside training: each reads its words, then imports what it needs.

Nothing here imports jax before the words have been read.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl_post import recipes
from jaxrl_post.deterministic import ask_for_same_bits
from launch.arguments import TRAIN_USAGE, Parser, add_step, policy_parser
from launch.no_devices import look_for_none


def _fetch(words: Sequence[str]) -> None:
    parser = Parser(prog="python -m launch fetch", description="Put a named real model in the local cache.")
    parser.add_argument("name", metavar="NAME", help="for example smollm2-135m")
    name = parser.parse_args(words).name
    from launch.fetch import fetch

    print(fetch(name))


def _export(words: Sequence[str]) -> None:
    parser = Parser(
        prog="python -m launch export",
        description="Write a checkpoint of a run as a Hugging Face folder: safetensors, config, tokenizer.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run_dir of a recipe that was trained")
    parser.add_argument("--to", metavar="DIR", required=True, help="the folder to write")
    add_step(parser)
    arguments = parser.parse_args(words)
    from launch.export import export

    export(arguments.run_dir, arguments.to, arguments.step)


def _pairs(words: Sequence[str]) -> None:
    parser = Parser(
        prog="python -m launch pairs",
        description="Turn a run's graded samples into preferences.jsonl (right against wrong answers) and right.jsonl.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run_dir of an online recipe that was run")
    parser.add_argument("--to", metavar="DIR", required=True, help="the folder to write")
    parser.add_argument("--threshold", type=float, default=1.0, help="reward from which on an answer is right (1.0)")
    parser.add_argument("--per-question", type=int, default=8, help="most rows for each question and file (8)")
    arguments = parser.parse_args(words)
    from launch.pairs import pairs

    pairs(arguments.run_dir, arguments.to, arguments.threshold, arguments.per_question)


def _evaluate(words: Sequence[str]) -> None:
    parser = policy_parser(
        "evaluate", "Greedy accuracy, and the best of k samples (pass@k), on a task's held-out prompts."
    )
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt (8)")
    parser.add_argument("--train", action="store_true", help="answer training prompts instead of held-out ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_intermixed_args(words)
    source, weights = _policy_paths(given)
    from launch.compile_cache import enable
    from launch.evaluate import evaluate

    enable()
    evaluate(source, given.overrides, weights, given.samples, given.train, given.json, given.step)


def _sample(words: Sequence[str]) -> None:
    parser = policy_parser("sample", "Sample from a model or a run: to the terminal, or JSON lines for many prompts.")
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="may be given several times")
    parser.add_argument("--file", metavar="FILE", help='JSON lines, each {"prompt": text} or {"messages": [...]}')
    parser.add_argument("--samples", type=int, default=1, help="samples of each prompt (1)")
    parser.add_argument("--max-tokens", type=int, help="new tokens of each sample (rollout.max_new_tokens)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (rollout.temperature)")
    parser.add_argument("--stream", action="store_true", help="write the text as it is sampled, with --to too")
    parser.add_argument("--to", metavar="FILE", help="write JSON lines {prompt, completion, ids, logp, stop} here")
    given = parser.parse_intermixed_args(words)
    source, weights = _policy_paths(given)
    from launch.compile_cache import enable
    from launch.sample import Asked, sample

    enable()
    file, to = (Path(path) if path else None for path in (given.file, given.to))
    asked = Asked(given.prompt, file, given.samples, given.max_tokens, given.temperature, given.stream, to)
    sample(source, given.overrides, weights, asked, given.step)


def _serve(words: Sequence[str]) -> None:
    parser = policy_parser(
        "serve",
        "Serve a model or a run over HTTP, as OpenAI's API (extra `serve`). Sampling options that a request does not "
        "name are those of the recipe's rollout section, but for the number of tokens.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 is open to other machines (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any that is free (8000)")
    parser.add_argument("--api-key-file", metavar="FILE", help="holds the key clients must give (JAXRL_POST_API_KEY)")
    parser.add_argument("--name", help="the model's name for clients (that of the recipe or folder)")
    parser.add_argument("--slots", type=int, default=16, help="samples decoded at once (16)")
    parser.add_argument("--max-queue", type=int, default=256, help="samples that may wait; more is status 429 (256)")
    parser.add_argument("--context", type=int, default=2048, help="most tokens of prompt and answer (2048)")
    parser.add_argument("--steps", type=int, default=4, help="tokens sampled between two looks at the queue (4)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take (600)")
    parser.add_argument("--no-warm-up", action="store_true", help="compile when requests come; /health is 200 at once")
    given = parser.parse_intermixed_args(words)
    source, weights = _policy_paths(given)
    if importlib.util.find_spec("uvicorn") is None:
        raise ValueError("serve needs its extra: pip install -e '.[serve]'")
    from launch.compile_cache import enable
    from launch.serve import Asked, serve

    enable()
    key_file = Path(given.api_key_file) if given.api_key_file else None
    asked = Asked(
        given.host, given.port, key_file, given.name, given.slots, given.max_queue, given.context, given.steps,
        given.timeout, not given.no_warm_up,
    )  # fmt: skip
    serve(source, given.overrides, weights, asked, given.step)


def _manifest(scheduler: str, words: Sequence[str]) -> None:
    from launch import orders

    parser = Parser(prog=f"python -m launch {scheduler}", description="Write a ready file that trains on many hosts.")
    orders.add_options(parser, scheduler)
    given = parser.parse_intermixed_args(words)
    orders.write(scheduler, given, recipe_path(given.config))


def _plan(words: Sequence[str]) -> int:
    parser = Parser(
        prog="python -m launch plan",
        description="Compile a recipe's programs for hardware that is not there, and say what they would take. Exit "
        "codes: 0 it fits, 1 it does not, 2 it cannot be compiled.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a recipe; its model needs a config.json and no weights")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="as in training")
    parser.add_argument("--target", metavar="T", action="append", required=True, help="v5p:8x8x8, h200:1x8, …")
    parser.add_argument("--sweep", action="store_true", help="try the meshes there are, and rank them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_intermixed_args(words)
    config = recipes.load(recipe_path(given.config), given.overrides)
    ask_for_same_bits(config)  # a plan is of the programs that the run would have
    look_for_none()
    from launch.plan import plan

    return plan(config, given.target, given.json, given.sweep)


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "fetch": _fetch,
    "export": _export,
    "pairs": _pairs,
    "evaluate": _evaluate,
    "sample": _sample,
    "serve": _serve,
    "plan": _plan,
    "slurm": functools.partial(_manifest, "slurm"),
    "k8s": functools.partial(_manifest, "k8s"),
    "skypilot": functools.partial(_manifest, "skypilot"),
}


def _policy_paths(given: argparse.Namespace) -> tuple[Path, Path | None]:
    """The recipe or run folder, and the run whose weights are taken instead."""
    source = Path(given.source) if Path(given.source).is_dir() else recipe_path(given.source)
    return source, Path(given.weights) if given.weights else None


def recipe_path(config: str) -> Path:
    """The recipe's path, after a look at what a word that is no file may have meant."""
    path = Path(config)
    if path.exists() or path.suffix in (".yaml", ".yml") or "/" in config:
        return path
    if "=" in config:
        raise ValueError(f"{config}: the recipe comes before the overrides: {TRAIN_USAGE}")
    stems = {found.stem: str(found) for found in sorted(Path("configs").rglob("*.yaml"))}
    near = difflib.get_close_matches(config, [*COMMANDS, *stems], n=1)
    meant = f" Did you mean {stems.get(near[0], near[0])}?" if near else ""
    raise ValueError(
        f"{config} is neither a recipe nor a command ({', '.join(COMMANDS)}).{meant} To train: {TRAIN_USAGE}"
    )
