"""Rewards of the user's own: a function named in the recipe."""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

RewardFunction = Callable[[list[str], list[str], list[dict[str, Any]]], Sequence[float | None]]
"""(prompts, completions, rows) -> one score for each completion; the three lists are aligned."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def describe(error: BaseException) -> str:
    """Kind and message of an error of foreign code, on one line, with the place that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({Path(last.filename).name}:{last.lineno})"


def load_function(path: str, section: str = "reward", options: Mapping[str, Any] = NO_OPTIONS) -> RewardFunction:
    """Imports `module:function`, given in that section of a recipe, which takes `options` as keywords too.

    Raises: ValueError saying which part is wrong.
    """
    module_name, _, name = path.partition(":")
    key = f"{section}.function={path!r}"
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module's own code runs here, and may raise anything
        raise ValueError(
            f"{key}: importing module {module_name!r} failed: {describe(error)}. "
            "It must be importable from the folder the run is started in"
        ) from error
    if name not in vars(module):
        raise ValueError(f"{key}: module {module_name!r} has no {name!r}; it has {', '.join(_callables(module))}")
    found = vars(module)[name]
    if not callable(found) or inspect.isclass(found) or inspect.iscoroutinefunction(found):
        raise ValueError(f"{key}: {name!r} is {found!r}, not a plain function (prompts, completions, rows)")
    function = functools.partial(found, **options)
    _check_signature(function, key)
    return function


def _callables(module: Any) -> list[str]:
    return sorted(name for name, value in vars(module).items() if inspect.isfunction(value)) or ["no functions"]


def _check_signature(function: Callable[..., Any], key: str) -> None:
    try:
        inspect.signature(function).bind([], [], [])
    except TypeError as error:
        raise ValueError(
            f"{key}: must take (prompts, completions, rows), but has {inspect.signature(function)}: {error}"
        ) from error
