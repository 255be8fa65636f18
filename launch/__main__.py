"""`python -m launch`: train from a recipe; fetch a model, evaluate, export a run, make training data of its samples.

Nothing here imports jax: a misspelt key or a call for help is answered at once. Exit codes: 0 done, 2 something in the
command or the recipe is wrong (one line on standard error says what), 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from jaxrl_post import recipes
from jaxrl_post.config_offline import OfflineConfig
from launch.faults import is_user_error

TRAIN_USAGE = "python -m launch CONFIG [section.key=value ...] [--print-config]"
OTHER_USAGES = (
    "python -m launch fetch NAME",
    "python -m launch export RUN_DIR --to DIR",
    "python -m launch pairs RUN_DIR --to DIR",
    "python -m launch evaluate CONFIG|RUN_DIR [section.key=value ...] [--weights RUN_DIR]",
)


def main(words: Sequence[str]) -> int:
    """Run one command line; returns its exit code."""
    command, rest = (COMMANDS[words[0]], words[1:]) if words and words[0] in COMMANDS else (_train, words)
    try:
        command(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if not is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _train(words: Sequence[str]) -> None:
    arguments = _train_arguments(words)
    config = recipes.load(_recipe_path(arguments.config), arguments.overrides)
    if arguments.print_config:
        print(recipes.dump(config), end="")
        return
    from launch.compile_cache import enable

    enable()
    if isinstance(config, OfflineConfig):
        from jaxrl_post.loops.offline import run as run_offline

        run_offline(config)
    else:
        from jaxrl_post.loops.online import run

        run(config)


def _fetch(words: Sequence[str]) -> None:
    parser = _Parser(prog="python -m launch fetch", description="Put a named real model in the local cache.")
    parser.add_argument("name", metavar="NAME", help="for example smollm2-135m")
    name = parser.parse_args(words).name
    from launch.fetch import fetch

    print(fetch(name))


def _export(words: Sequence[str]) -> None:
    parser = _Parser(
        prog="python -m launch export",
        description="Write the newest checkpoint of a run as a Hugging Face folder: safetensors, config, tokenizer.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run_dir of a recipe that was trained")
    parser.add_argument("--to", metavar="DIR", required=True, help="the folder to write")
    arguments = parser.parse_args(words)
    from launch.export import export

    export(arguments.run_dir, arguments.to)


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
    parser = _Parser(
        prog="python -m launch evaluate",
        description="Greedy accuracy, and the best of k samples (pass@k), on the held-out prompts of a recipe's task.",
    )
    parser.add_argument("source", metavar="CONFIG|RUN_DIR", help="an online recipe, or the folder of its run")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="as in training")
    parser.add_argument("--weights", metavar="RUN_DIR", help="take the newest weights of this run (online or offline)")
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt (8)")
    parser.add_argument("--train", action="store_true", help="answer training prompts instead of held-out ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_intermixed_args(words)
    source = Path(given.source) if Path(given.source).is_dir() else _recipe_path(given.source)
    from launch.compile_cache import enable
    from launch.evaluate import evaluate

    enable()
    weights = Path(given.weights) if given.weights else None
    evaluate(source, given.overrides, weights, given.samples, given.train, given.json)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "fetch": _fetch,
    "export": _export,
    "pairs": _pairs,
    "evaluate": _evaluate,
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
        "preference data of its samples; evaluate measures accuracy and pass@k.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML recipe, such as configs/quickstart.yaml")
    parser.add_argument(
        "overrides", metavar="section.key=value", nargs="*", help="values are YAML; text may need quotes"
    )
    parser.add_argument("--print-config", action="store_true", help="print the effective recipe and stop")
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
