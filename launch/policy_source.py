"""What `sample` and `serve` are given: a recipe or the folder of a run, and perhaps the weights of another run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxrl_post import recipes
from jaxrl_post.loops.policy import Policy, load_policy


def read_policy(source: Path, overrides: Sequence[str], weights: Path | None) -> Policy:
    """The policy of a recipe, or of the newest weights of a run (the folder's own, unless `weights` is another).

    Raises: ValueError as `recipes.load` and `load_policy`.
    """
    if source.is_dir():
        weights = weights or source
        source = source / "config.yaml"
    return load_policy(recipes.load(source, overrides), weights)
