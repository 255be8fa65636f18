"""`debug.deterministic`: what XLA's compiler for GPUs is asked for. It reads its flags when its first program comes, so
this is done before, and imports no jax.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping

from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig

VARIABLE = "XLA_FLAGS"
# No operation adds with atomics or in an order of its own; no kernel is chosen by timing.
NEEDED = {"--xla_gpu_deterministic_ops": "true", "--xla_gpu_autotune_level": "0"}
SAME = {"": "true", "1": "true"}  # other words for a value


def ask_for_same_bits(config: Config | OfflineConfig, environ: MutableMapping[str, str] = os.environ) -> None:
    """Add to the environment's flags those that a deterministic run needs and the user has not given. On CPUs and TPUs
    they mean nothing.

    Raises: ValueError where the user's own say otherwise.
    """
    if not config.debug.deterministic:
        return
    given = environ.get(VARIABLE, "").strip()
    if given and not given.startswith("-"):
        raise ValueError(
            f"{VARIABLE}={given} is the name of a file, which debug.deterministic=true cannot add to: give the flags "
            "themselves, or set debug.deterministic=false"
        )
    for flag, value in _values(given):
        if flag in NEEDED and SAME.get(value, value) != NEEDED[flag]:
            raise ValueError(
                f"{VARIABLE} has {flag}={value}, and debug.deterministic=true needs {flag}={NEEDED[flag]}: take it out "
                "of there, or set debug.deterministic=false"
            )
    environ[VARIABLE] = " ".join([*given.split(), *lacking(environ)])


def lacking(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The flags that are not in the environment."""
    given = {flag for flag, _ in _values(environ.get(VARIABLE, ""))}
    return [f"{flag}={value}" for flag, value in NEEDED.items() if flag not in given]


def _values(flags: str) -> Iterator[tuple[str, str]]:
    for word in flags.split():
        flag, _, value = word.partition("=")
        yield flag, value
