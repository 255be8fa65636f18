"""Procedural datasets of the package reasoning-gym, an extra of this one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jaxrl_post import config
from jaxrl_post.data.jsonl import Row


def import_reasoning_gym() -> ModuleType:
    """The package, imported only where it is used. Raises ValueError saying how to install it."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ValueError(
            f"kind=reasoning_gym needs a package that is not installed ({error.name}): pip install 'jaxrl-post[tasks]'"
        ) from error
    return reasoning_gym


def gym_rows(task: config.ReasoningGymTask, seed: int) -> GymRows:
    """`task.size + task.held_out` rows; a row depends on (seed, index) alone.

    Datasets with few distinct questions repeat them, so a row may occur again further on.
    Raises ValueError for an unknown dataset (with its nearest names) and for options it does not take.
    """
    gym = import_reasoning_gym()
    _check_names(task, gym.factory.DATASETS)
    try:
        dataset = gym.create_dataset(task.dataset, seed=seed, size=task.size + task.held_out, **task.options)
    except (ValueError, TypeError, AssertionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"data.task.options={task.options} are refused by {task.dataset!r}: {reason}") from error
    return GymRows(task.dataset, task.options, dataset, range(task.size + task.held_out))


def _check_names(task: config.ReasoningGymTask, datasets: dict[str, Any]) -> None:
    if task.dataset not in datasets:
        near = difflib.get_close_matches(task.dataset, datasets, n=3, cutoff=0.4) or sorted(datasets)
        raise ValueError(f"data.task.dataset={task.dataset!r} is not in reasoning-gym: did you mean {', '.join(near)}?")
    _, options_class = datasets[task.dataset]
    known = {field.name for field in dataclasses.fields(options_class)} - {"seed", "size"}
    if unknown := sorted(set(task.options) - known):
        raise ValueError(
            f"data.task.options has {', '.join(unknown)}; {task.dataset!r} takes {', '.join(sorted(known))} "
            "(its seed and size come from the run's seed, data.task.size and data.task.held_out)"
        )


class GymRows(Sequence[Row]):
    """Rows generated on access; each carries `dataset`, `options` and `metadata`, which its scorer needs."""

    def __init__(self, name: str, options: dict[str, Any], items: Sequence[Row], indices: range):
        self._name, self._options, self._items, self._indices = name, options, items, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return GymRows(self._name, self._options, self._items, self._indices[index])
        item = self._items[self._indices[index]]
        kept = {"prompt": item["question"], "answer": item["answer"], "metadata": item["metadata"]}
        return kept | {"dataset": self._name, "options": self._options}
