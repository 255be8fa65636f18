"""XLA's persistent compilation cache: a program compiled by one run is loaded by the next."""

from __future__ import annotations

import os

import jax

from jaxrl_post.models.zoo import cache_folder


def enable() -> None:
    """Keep compiled programs in the user's cache, unless `JAX_COMPILATION_CACHE_DIR` names another place for them."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
