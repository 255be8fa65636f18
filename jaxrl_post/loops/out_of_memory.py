"""What a run says when memory runs out: in which phase, with which shapes, and what to lower."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax

from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.loops.network import Network
from jaxrl_post.observe.progress import Phases
from jaxrl_post.training.packing import PackShape

SHOWN = 300  # characters of the allocator's own report
SAMPLING = ("rollout.slots", "data.prompts_per_step", "rollout.max_new_tokens")
SCORING = ("training.tokens_per_microbatch", "training.logprob_chunk")
HOLDING = ("model.param_dtype", "mesh.fsdp", "mesh.tensor")


class OutOfMemoryError(ValueError):
    """A device or the host has no room for what the recipe asks."""


@contextlib.contextmanager
def memory_explained(
    config: Config | OfflineConfig, network: Network, shape: PackShape, phases: Phases
) -> Iterator[Phases]:
    """Gives `phases` to time what happens inside; running out of memory there is an error of the recipe.

    Raises: OutOfMemoryError, from the original, with its first line.
    """
    try:
        yield phases
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        phase = phases.broken or "between phases"
        raise OutOfMemoryError(_explanation(config, network, shape, phase, error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _explanation(
    config: Config | OfflineConfig, network: Network, shape: PackShape, phase: str, error: BaseException
) -> str:
    model = network.model
    sampling = isinstance(config, Config) and phase in ("gen", "testing")
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:SHOWN]
    return (
        f"out of memory in {phase}: {_samples(config) if sampling else _rows(config, shape)}; {model.family} of "
        f"{model.parameter_count() / 1e6:.1f}M parameters, vocabulary {model.vocab_size}, {model.dtype} compute on "
        f"{network.mesh.size} device{'s' * (network.mesh.size > 1)}. {_advice(config, phase, sampling)}. Checkpoints "
        f"are untouched. The error was: {said}"
    )


def _samples(config: Config | OfflineConfig) -> str:
    assert isinstance(config, Config)
    return (
        f"{config.data.prompts_per_step} prompts × {config.rollout.samples_per_prompt} samples of up to "
        f"{config.data.max_prompt_tokens} + {config.rollout.max_new_tokens} tokens"
    )


def _rows(config: Config | OfflineConfig, shape: PackShape) -> str:
    return (
        f"micro-batches of {shape.rows} rows × {shape.length} tokens, logits of {config.training.logprob_chunk} "
        "targets a row at once"
    )


def _advice(config: Config | OfflineConfig, phase: str, sampling: bool) -> str:
    if sampling:
        return f"Lower {_settings(config, SAMPLING)}"
    if phase == "reward":
        return "Lower tokens_per_batch of a reward model; graders of text take the host's memory"
    if phase in ("start", "save_checkpoint", "between phases"):
        return f"Change {_settings(config, HOLDING)}: weights and optimizer themselves do not fit"
    may_recompute = phase.startswith("update") and not config.model.remat.startswith("full")
    recompute = "; set model.remat=full" if may_recompute else ""
    return f"Lower {_settings(config, SCORING)}{recompute}"


def _settings(config: Config | OfflineConfig, names: tuple[str, ...]) -> str:
    values = {name: functools.reduce(getattr, name.split("."), config) for name in names}
    return ", ".join(f"{name} (now {'null' if value is None else value})" for name, value in values.items())
