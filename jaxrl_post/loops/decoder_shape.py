"""The shape of a recipe's decoder: from its folder or `model.random`, with what is `auto` decided by the platform."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import jax

from jaxrl_post.config import Config, RandomModel
from jaxrl_post.config_model import Dtype, Mixture
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.models.config import Experts, ModelConfig
from jaxrl_post.models.grouped import unfit
from jaxrl_post.models.huggingface import read_config
from sharding.rules import ROLLOUT, ZERO

SHALLOW = 8  # layers; each that is not scanned takes half a second or so to compile


def model_config(
    config: Config | OfflineConfig, folder: Path | None, vocab_size: int, platform: str | None = None, tensor: int = 1
) -> ModelConfig:
    """The decoder's shape from its folder or `model.random`, with this run's dtypes and remat policy.

    What is `auto` goes by `platform` (cpu, gpu or tpu); None is this process's own. Widths are cut in `tensor` parts.
    """
    platform = platform or jax.default_backend()
    shape = (
        read_config(folder) if folder is not None else random_config(config.model.random or RandomModel(), vocab_size)
    )
    dtype = compute_dtype(config.model.dtype, platform)
    return dataclasses.replace(
        shape,
        dtype=dtype,
        param_dtype=config.model.param_dtype,
        remat=config.model.remat,
        scan_layers=_scans(config.model.scan_layers, shape.layers, platform),
        platform=platform,
        moe=_experts(shape, config.model.moe, platform, tensor, whole=ZERO[config.mesh.zero].weights == ROLLOUT),
    )


def _experts(shape: ModelConfig, options: Mixture, platform: str, tensor: int, whole: bool) -> Experts | None:
    """The experts of the model with the backend asked for. Raises: ValueError for options of a model without any."""
    if shape.moe is None:
        if asked := options.model_dump(exclude_defaults=True):
            key, value = next(iter(asked.items()))
            raise ValueError(
                f"model.moe.{key}={value}: a {shape.family} model has no experts; remove the key, or use a Mixtral, "
                "Qwen2-MoE or Qwen3-MoE model"
            )
        return None
    backend = _grouping(options.backend, shape.hidden_size, shape.moe.size // tensor, platform)
    return dataclasses.replace(shape.moe, backend=backend, whole=whole)


def _grouping(
    asked: Literal["auto", "blocked", "ragged", "grouped"], D: int, F: int, platform: str
) -> Literal["blocked", "ragged", "grouped", "interpreted"]:
    """How products with experts of a width that a device holds are computed. Raises: ValueError for kernels that cannot
    serve."""
    obstacle = "these kernels are for NVIDIA GPUs, and these devices are TPUs" if platform == "tpu" else unfit(D, F)
    if asked == "auto" and platform == "tpu":
        return "ragged"
    if asked == "auto":
        return "grouped" if platform == "gpu" and not obstacle else "blocked"
    if asked != "grouped":
        return asked
    if obstacle:
        raise ValueError(f"model.moe.backend=grouped: {obstacle}: set model.moe.backend=auto")
    return "grouped" if platform == "gpu" else "interpreted"


def _scans(asked: bool | Literal["auto"], layers: int, platform: str) -> bool:
    """`auto`: shallow models on a CPU are not scanned, which takes a fifth off an update there."""
    if asked == "auto":
        return platform != "cpu" or layers > SHALLOW
    return asked


def compute_dtype(dtype: Dtype, platform: str) -> str:
    """`auto` is float32 on CPUs and bfloat16 on accelerators."""
    if dtype == "auto":
        return "float32" if platform == "cpu" else "bfloat16"
    return dtype


def random_config(random: RandomModel, vocab_size: int) -> ModelConfig:
    experts = None
    if random.experts is not None:
        count, per_token, size = random.experts.count, random.experts.per_token, random.experts.size
        experts = Experts(count, per_token, size, shared_size=size if random.family == "qwen2_moe" else 0)
    return ModelConfig(
        family=random.family,
        vocab_size=vocab_size,
        hidden_size=random.hidden_size,
        intermediate_size=experts.size if experts and random.family == "mixtral" else random.intermediate_size,
        layers=random.layers,
        heads=random.heads,
        kv_heads=random.kv_heads,
        head_dim=random.head_dim,
        tie_embeddings=random.tie_embeddings,
        initializer_range=random.initializer_range,
        max_positions=8192,
        moe=experts,
    )
