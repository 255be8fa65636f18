"""`python -m launch evaluate CONFIG|RUN_DIR`: greedy accuracy and pass@k of a model or of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_post import recipes
from jaxrl_post.config import Config
from jaxrl_post.deterministic import ask_for_same_bits
from jaxrl_post.loops.evaluation import evaluate as measure
from jaxrl_post.loops.run_folder import Which
from launch.policy_source import recipe_and_weights


def evaluate(
    source: Path,
    overrides: Sequence[str],
    weights: Path | None,
    samples: int,
    train: bool,
    as_json: bool,
    which: Which = None,
) -> None:
    """Print a table on standard output, or with `as_json` one JSON object of metrics.

    `source` is a recipe, or the folder of an online run, whose newest weights are then the default, or those that
    `which` names. `weights` is another run of the same model, such as an offline one. Raises: ValueError as
    `loops.evaluation.evaluate`, and for a recipe that has no task.
    """
    source, weights = recipe_and_weights(source, weights, which)
    _online(source, overrides)  # before an override that only online recipes have
    config = _online(source, [*overrides, f"rollout.samples_per_prompt={samples}"])
    ask_for_same_bits(config)
    metrics = measure(config, weights, train, lambda line: print(line, file=sys.stderr, flush=True), which)
    if as_json:
        print(json.dumps(metrics))
    else:
        width = max(map(len, metrics))
        print("\n".join(f"{name:<{width}}  {value:.4f}" for name, value in metrics.items()))


def _online(source: Path, overrides: Sequence[str]) -> Config:
    config = recipes.load(source, overrides)
    if not isinstance(config, Config):
        raise ValueError(
            f"{source} is an offline recipe (algorithm.kind={config.algorithm.kind}) and has no task to answer: give "
            "an online recipe, and this run by --weights RUN_DIR"
        )
    return config
