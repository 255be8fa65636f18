"""`python -m launch`: train from a recipe; fetch a model, evaluate, sample, serve, export a run.

Nothing here imports jax: a misspelt key or a call for help is answered at once. Exit codes: 0 done, 2 something in the
command or the recipe is wrong (one line on standard error says what), 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NoReturn

from jaxrl_post import recipes
from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.deterministic import ask_for_same_bits
from jaxrl_post.run_dir import check_run_dir
from launch import cluster
from launch.faults import INTERRUPTED, REFUSED, is_user_error
from launch.no_devices import look_for_none, skip_absent_devices
from launch.supervisor import Cast, add_options, check_supervised, supervise

TRAIN_USAGE = "python -m launch CONFIG [section.key=value ...] [--print-config] [--processes N]"
OTHER_USAGES = (
    "python -m launch fetch NAME",
    "python -m launch export RUN_DIR --to DIR [--step N|best]",
    "python -m launch pairs RUN_DIR --to DIR",
    "python -m launch evaluate CONFIG|RUN_DIR [section.key=value ...] [--weights RUN_DIR]",
    "python -m launch sample CONFIG|RUN_DIR [section.key=value ...] --prompt TEXT",
    "python -m launch serve CONFIG|RUN_DIR [section.key=value ...] [--port 8000]",
    "python -m launch slurm|k8s|skypilot CONFIG [section.key=value ...] --hosts N",
    "python -m launch plan CONFIG [section.key=value ...] --target h200:1x8 [--target …] [--sweep] [--json]",
)


def main(words: Sequence[str]) -> int:
    """Run one command line; returns its exit code."""
    command, rest = (COMMANDS[words[0]], words[1:]) if words and words[0] in COMMANDS else (_train, words)
    skip_absent_devices()
    try:
        return command(rest) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        if not is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return REFUSED


def _train(words: Sequence[str]) -> int:
    arguments = _train_arguments(words)
    config = recipes.load(_recipe_path(arguments.config), arguments.overrides)
    if arguments.print_config:
        print(recipes.dump(config), end="")
        return 0
    ask_for_same_bits(config)
    if arguments.replay is not None:
        if arguments.rollouts or arguments.rollout_only or arguments.processes is not None:
            raise ValueError("--replay makes one update, here: leave out --rollouts, --rollout-only and --processes")
        _replay(config, Path(arguments.replay))
        return 0
    mode = _mode(arguments, config)
    check_supervised(arguments)
    check_run_dir(config.run_dir)
    if arguments.processes is not None:
        cluster.check_alone(arguments)
        cast = Cast(arguments.processes, arguments.devices_per_process, arguments.max_restarts)
        command = [sys.executable, "-m", "launch", arguments.config, *arguments.overrides, *mode]
        return supervise(command, cast, Path(config.run_dir) / "logs")
    with cluster.joined(cluster.find_place(arguments), arguments.join_limit, arguments.lost_limit):
        _run(config, arguments.rollout_only, Path(arguments.rollouts) if arguments.rollouts else None)
    return 0


def _mode(arguments: argparse.Namespace, config: Config | OfflineConfig) -> list[str]:
    """The options, in words, that leave half of an online run out."""
    dumped = ["--rollouts", arguments.rollouts] if arguments.rollouts else []
    mode = dumped + ["--rollout-only"] * arguments.rollout_only
    if len(mode) > 2:
        raise ValueError("--rollout-only and --rollouts leave nothing to do: give one of them")
    if mode and isinstance(config, OfflineConfig):
        raise ValueError(f"{mode[0]}: algorithm.kind={config.algorithm.kind} trains on files and has no rollouts")
    return mode


def _run(config: Config | OfflineConfig, rollout_only: bool, rollouts: Path | None) -> None:
    from launch.compile_cache import enable

    enable()
    if isinstance(config, OfflineConfig):
        from jaxrl_post.loops.offline import run as run_offline

        run_offline(config)
    elif rollout_only:
        from jaxrl_post.loops.rollout_only import run_rollouts

        run_rollouts(config)
    else:
        from jaxrl_post.loops.online import run

        run(config, *([rollouts] if rollouts else []))


def _replay(config: Config | OfflineConfig, folder: Path) -> None:
    from launch.compile_cache import enable
    from launch.replay import replay

    enable()
    replay(config, folder)


def _fetch(words: Sequence[str]) -> None:
    parser = _Parser(prog="python -m launch fetch", description="Put a named real model in the local cache.")
    parser.add_argument("name", metavar="NAME", help="for example smollm2-135m")
    name = parser.parse_args(words).name
    from launch.fetch import fetch

    print(fetch(name))


def _export(words: Sequence[str]) -> None:
    parser = _Parser(
        prog="python -m launch export",
        description="Write a checkpoint of a run as a Hugging Face folder: safetensors, config, tokenizer.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run_dir of a recipe that was trained")
    parser.add_argument("--to", metavar="DIR", required=True, help="the folder to write")
    _add_step(parser)
    arguments = parser.parse_args(words)
    from launch.export import export

    export(arguments.run_dir, arguments.to, arguments.step)


def _pairs(words: Sequence[str]) -> None:
    parser = _Parser(
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
    parser = _policy_parser(
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
    parser = _policy_parser("sample", "Sample from a model or a run: to the terminal, or JSON lines for many prompts.")
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
    parser = _policy_parser("serve", "Serve a model or a run over HTTP, as OpenAI's API (extra `serve`).")
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

    parser = _Parser(prog=f"python -m launch {scheduler}", description="Write a ready file that trains on many hosts.")
    orders.add_options(parser, scheduler)
    given = parser.parse_intermixed_args(words)
    orders.write(scheduler, given, _recipe_path(given.config))


def _plan(words: Sequence[str]) -> int:
    parser = _Parser(
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
    config = recipes.load(_recipe_path(given.config), given.overrides)
    ask_for_same_bits(config)  # a plan is of the programs that the run would have
    look_for_none()
    from launch.plan import plan

    return plan(config, given.target, given.json, given.sweep)


def _policy_parser(command: str, description: str) -> _Parser:
    parser = _Parser(prog=f"python -m launch {command}", description=description)
    parser.add_argument("source", metavar="CONFIG|RUN_DIR", help="a recipe, or the folder of its run")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="as in training")
    parser.add_argument("--weights", metavar="RUN_DIR", help="take the newest weights of this run (online or offline)")
    _add_step(parser)
    return parser


def _add_step(parser: _Parser) -> None:
    parser.add_argument(
        "--step", metavar="N|best", type=_step, help="of which step, or of the best (checkpoint.keep_best); the newest"
    )


def _step(word: str) -> int | Literal["best"]:
    if word == "best":
        return "best"
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is neither a step nor best")
    return int(word)


def _policy_paths(given: argparse.Namespace) -> tuple[Path, Path | None]:
    source = Path(given.source) if Path(given.source).is_dir() else _recipe_path(given.source)
    return source, Path(given.weights) if given.weights else None


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


class _Parser(argparse.ArgumentParser):
    """Reports a mistake the way every other error is reported."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}\n{self.format_usage().rstrip()}")


def _train_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m launch",
        usage="\n       ".join([TRAIN_USAGE, *OTHER_USAGES]),
        description="Train from a recipe. An override sets one key of it: optimizer.learning_rate=2e-6.",
        epilog="fetch puts a named model in the local cache; export writes a run as a Hugging Face folder; pairs makes "
        "preference data of its samples; evaluate measures accuracy and pass@k; sample and serve answer prompts.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML recipe, such as configs/quickstart.yaml")
    parser.add_argument(
        "overrides", metavar="section.key=value", nargs="*", help="values are YAML; text may need quotes"
    )
    parser.add_argument("--print-config", action="store_true", help="print the effective recipe and stop")
    parser.add_argument("--rollout-only", action="store_true", help="sample and grade `steps` times, learn nothing")
    parser.add_argument(
        "--rollouts", metavar="DIR", help="train on what another run sampled, RUN_DIR or RUN_DIR/rollouts"
    )
    parser.add_argument(
        "--replay", metavar="DUMP", help="make one update again that was kept in RUN_DIR/faults, and look into it"
    )
    add_options(parser)
    cluster.add_options(parser)
    if not words:
        parser.error("give a recipe, such as configs/quickstart.yaml")
    dashed = [word for word in words if word.startswith("-") and "=" in word]
    if dashed:
        raise ValueError(f"{dashed[0]}: an override has no dashes; write {dashed[0].lstrip('-')}")
    return parser.parse_intermixed_args(words)


def _recipe_path(config: str) -> Path:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
