"""Where a model's shape and weights come from, and in which dtypes they are held."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from jaxrl_post.config_base import Section

Dtype = Literal["auto", "float32", "bfloat16"]


class RandomModel(Section):
    """A small randomly initialised decoder with a byte tokenizer: recipes and tests that need no download."""

    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    hidden_size: PositiveInt = 64
    intermediate_size: PositiveInt = 128
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 16
    tie_embeddings: bool = True
    initializer_range: float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> RandomModel:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs of features")
        return self


class Model(Section):
    path: str | None = None
    """A Hugging Face folder (config.json, *.safetensors, tokenizer.json), or a name `launch fetch` knows."""
    random: RandomModel | None = None
    """Instead of `path`: a random tiny model."""
    dtype: Dtype = "auto"
    """Compute dtype; `auto` is bfloat16 on accelerators and float32 on CPU."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the master weights."""
    remat: Literal["none", "full", "dots"] = "none"
    """What the backward pass recomputes: nothing, each whole layer, or everything but matrix products."""
    scan_layers: bool | Literal["auto"] = "auto"
    """Whether an update loops over one compiled layer; otherwise layers are compiled in a row, which is faster on CPUs
    and slower to compile. `auto`: a loop, but on CPUs for models of at most 8 layers."""
    attention: Literal["auto", "xla"] = "auto"
    """Attention backend; `auto` picks one that honours the mask and logs its pick."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.random is None):
            raise ValueError(
                "give exactly one of model.path (a folder or a fetchable name) and model.random; "
                "an override sets the other to null (model.random=null)"
            )
        return self
