"""`python -m launch`: train from a recipe; fetch a model, evaluate, sample, serve, export a run.

Nothing here imports jax: a misspelt key or a call for help is answered at once. Exit codes: 0 done, 2 something in the
command or the recipe is wrong (one line on standard error says what), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys

from launch.huge_pages import restart_with_huge_pages
from launch.no_devices import skip_absent_devices

if __name__ == "__main__":  # before what takes longer to import
    skip_absent_devices()
    restart_with_huge_pages()

from collections.abc import Sequence
from pathlib import Path

from jaxrl_post import recipes
from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.deterministic import ask_for_same_bits
from jaxrl_post.run_dir import check_run_dir
from launch import cluster
from launch.arguments import TRAIN_USAGE, Parser
from launch.commands import COMMANDS, recipe_path
from launch.faults import INTERRUPTED, REFUSED, is_user_error
from launch.supervisor import Cast, add_options, check_supervised, supervise

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
    config = recipes.load(recipe_path(arguments.config), arguments.overrides)
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


def _train_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
