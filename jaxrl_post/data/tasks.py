"""Tasks: rows to train on and rows held out for evaluation.

A row is a dict with `prompt` (text) or `messages` (chat), mostly `answer`, and whatever else its reward reads.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from pathlib import Path

from jaxrl_post import config
from jaxrl_post.data.gym import gym_rows
from jaxrl_post.data.jsonl import Row, read_rows

OPERATIONS = {"add": ("+", operator.add), "subtract": ("-", operator.sub), "multiply": ("*", operator.mul)}


@dataclasses.dataclass(frozen=True)
class Task:
    """`name` is short, for metrics; `held_out` may be empty (no evaluation).

    `dropped` says `file:line: why` for every row skipped on reading.
    """

    name: str
    train: Sequence[Row]
    held_out: Sequence[Row] = ()
    dropped: tuple[str, ...] = ()


def load_task(task: config.ArithmeticTask | config.JsonlTask | config.ReasoningGymTask, seed: int = 0) -> Task:
    """The rows a recipe's `data.task` stands for; `seed` matters to procedural tasks only.

    Raises ValueError naming the key of `data.task` to change when there are no rows to train on.
    """
    match task:
        case config.ArithmeticTask():
            return arithmetic(task)
        case config.JsonlTask():
            return jsonl(task)
        case config.ReasoningGymTask():
            return reasoning_gym(task, seed)


def arithmetic(task: config.ArithmeticTask) -> Task:
    """Every pair of operands in [low, high]; pairs with (7a + 3b) divisible by 5 are held out, a fifth of them."""
    operands = range(task.low, task.high + 1)
    symbol, apply = OPERATIONS[task.operation]
    train: list[Row] = []
    held_out: list[Row] = []
    for a, b in ((a, b) for a in operands for b in operands):
        row = {"prompt": task.template.format(a=a, op=symbol, b=b), "answer": str(apply(a, b))}
        (train if (7 * a + 3 * b) % 5 else held_out).append(row)
    if not train:
        raise ValueError(
            f"data.task.low={task.low} and data.task.high={task.high} leave no pair to train on, as pairs with "
            "(7a + 3b) divisible by 5 are held out: widen the range"
        )
    return Task(f"arithmetic_{task.operation}", train, held_out)


def jsonl(task: config.JsonlTask) -> Task:
    """Rows of one file, and of a second one for evaluation; see `read_rows`."""
    train, dropped = read_rows(task.path, task)
    if task.held_out_path is None:
        return Task(Path(task.path).stem, train, dropped=tuple(dropped))
    held_out, more = read_rows(task.held_out_path, task, "data.task.held_out_path")
    return Task(Path(task.path).stem, train, held_out, tuple(dropped + more))


def reasoning_gym(task: config.ReasoningGymTask, seed: int) -> Task:
    """Items 0…size-1 of a reasoning-gym dataset to train on, the next `held_out` for evaluation."""
    rows = gym_rows(task, seed)
    return Task(task.dataset, rows[: task.size], rows[task.size :])
