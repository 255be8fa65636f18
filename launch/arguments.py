"""What commands have in common: how mistakes are reported, which checkpoint and policy are read."""

from __future__ import annotations

import argparse
from typing import Literal, NoReturn

TRAIN_USAGE = "python -m launch CONFIG [section.key=value ...] [--print-config] [--processes N]"


class Parser(argparse.ArgumentParser):
    """Reports a mistake the way every other error is reported."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}\n{self.format_usage().rstrip()}")


def policy_parser(command: str, description: str) -> Parser:
    """Of a command that reads a policy."""
    parser = Parser(prog=f"python -m launch {command}", description=description)
    parser.add_argument("source", metavar="CONFIG|RUN_DIR", help="a recipe, or the folder of its run")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="as in training")
    parser.add_argument("--weights", metavar="RUN_DIR", help="take the newest weights of this run (online or offline)")
    add_step(parser)
    return parser


def add_step(parser: Parser) -> None:
    """Which checkpoint of a run."""
    parser.add_argument(
        "--step", metavar="N|best", type=_step, help="of which step, or of the best (checkpoint.keep_best); the newest"
    )


def _step(word: str) -> int | Literal["best"]:
    if word == "best":
        return "best"
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is neither a step nor best")
    return int(word)
