"""What `evaluate`, `sample` and `serve` are given: a recipe or a run's folder, and perhaps another run's weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_post import recipes
from jaxrl_post.config import Config
from jaxrl_post.deterministic import ask_for_same_bits
from jaxrl_post.loops.decoding import decoding
from jaxrl_post.loops.policy import Policy, load_policy
from jaxrl_post.loops.run_folder import Which


def read_policy(source: Path, overrides: Sequence[str], weights: Path | None, which: Which = None) -> Policy:
    """The policy of a recipe or of a run. Raises: ValueError as `recipes.load`, `recipe_and_weights`, `load_policy`."""
    recipe, weights = recipe_and_weights(source, weights, which)
    config = recipes.load(recipe, overrides)
    ask_for_same_bits(config)
    return load_policy(config, weights, which)


def own_decoding(policy: Policy) -> dict[str, Any]:
    """How the recipe's rollout section has a request decoded, as `Decoding` takes it; empty where it has none."""
    if not isinstance(policy.config, Config):
        return {}
    rollout = policy.config.rollout
    stops = {"ignore_eos": rollout.ignore_eos, "stop_ids": rollout.stop_token_ids}
    return decoding(policy.config, policy.tokenizer) | stops


def recipe_and_weights(source: Path, weights: Path | None, which: Which = None) -> tuple[Path, Path | None]:
    """The recipe of a source, and the run with the weights: a run's folder is both, unless `weights` is another run.

    Raises: ValueError for a step of no run.
    """
    if which is not None and weights is None and not source.is_dir():
        raise ValueError(f"--step {which} is one of a run's checkpoints: give its RUN_DIR, or --weights RUN_DIR")
    return (source / "config.yaml", weights or source) if source.is_dir() else (source, weights)
