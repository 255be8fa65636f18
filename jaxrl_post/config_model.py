"""Where a model's shape and weights come from, and in which dtypes they are held."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from jaxrl_post.config_base import NonNegative, Section

Dtype = Literal["auto", "float32", "bfloat16"]


class RandomExperts(Section):
    """The mixture in the place of each layer's MLP."""

    count: PositiveInt = 8
    per_token: PositiveInt = 2
    size: PositiveInt = 64
    """Width of each expert, and of qwen2_moe's shared one."""

    @model_validator(mode="after")
    def _enough(self) -> RandomExperts:
        if self.per_token > self.count:
            raise ValueError(f"per_token={self.per_token} exceeds count={self.count}")
        return self


class RandomModel(Section):
    """A small randomly initialised decoder with a byte tokenizer: recipes and tests that need no download."""

    family: Literal["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"] = "llama"
    hidden_size: PositiveInt = 64
    intermediate_size: PositiveInt = 128
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 16
    tie_embeddings: bool = True
    initializer_range: float = Field(default=0.02, gt=0)
    experts: RandomExperts | None = None
    """For the families with experts, and for them alone."""

    @model_validator(mode="after")
    def _heads_divide(self) -> RandomModel:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs of features")
        if (self.experts is not None) != (self.family in ("mixtral", "qwen2_moe", "qwen3_moe")):
            needs = "needs experts: give count, per_token and size" if self.experts is None else "has no experts"
            raise ValueError(f"family={self.family} {needs}; families with experts: mixtral, qwen2_moe, qwen3_moe")
        return self


class Mixture(Section):
    """Experts and their routers, of a model that has them (Mixtral, Qwen2-MoE, Qwen3-MoE)."""

    backend: Literal["auto", "blocked", "ragged", "grouped"] = "auto"
    """How products are grouped by expert: `blocked`, a loop over blocks of one expert each; `grouped`, kernels for
    NVIDIA GPUs (on CPUs they are interpreted, to be looked at); or `ragged`, XLA's ragged product, which has a kernel
    on TPUs and elsewhere multiplies every row by every expert. `auto` picks by platform, and a run says which."""
    dispatch: Literal["auto", "gather", "all_to_all"] = "auto"
    """How tokens come to experts that other devices along `mesh.expert` hold: `gather`, every device takes everyone's,
    and outputs are reduce-scattered; `all_to_all`, a token is sent once to each device that holds an expert of its
    choice, and one row comes back. No token is dropped either way. `auto` is what loads links less on TPUs, elsewhere a
    gather; a run says which."""
    aux_loss_coef: NonNegative = 0.0
    """Of the load-balance loss of Switch Transformer, as transformers has it (`router_aux_loss_coef`). Without replay
    it takes a forward pass more: the balance is that of the whole update."""
    z_loss_coef: NonNegative = 0.0
    """Of the mean square of the routers' log-partition (ST-MoE)."""
    routing_replay: bool = False
    """The update sends each token to the experts that the sampler chose for it (R3, arXiv:2510.11370)."""

    @property
    def adds_loss(self) -> bool:
        return self.aux_loss_coef > 0 or self.z_loss_coef > 0


class Model(Section):
    path: str | None = None
    """A Hugging Face folder (config.json, *.safetensors, tokenizer.json), or a name `launch fetch` knows."""
    random: RandomModel | None = None
    """Instead of `path`: a random tiny model."""
    dtype: Dtype = "auto"
    """Compute dtype; `auto` is bfloat16 on accelerators and float32 on CPU."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the master weights."""
    remat: Literal["none", "full", "dots", "full_offload", "dots_offload"] = "none"
    """What the backward pass recomputes: nothing, each whole layer, or everything but matrix products. With `_offload`
    what is kept for that, layers' inputs or the products, waits in the host's pinned memory."""
    scan_layers: bool | Literal["auto"] = "auto"
    """Whether an update loops over one compiled layer; otherwise layers are compiled in a row, which is faster on CPUs
    and slower to compile. `auto`: a loop, but on CPUs for models of at most 8 layers."""
    attention: Literal["auto", "xla", "flash", "cudnn"] = "auto"
    """How packed rows attend: `xla`, which compiles for anything; `flash`, kernels for GPUs and TPUs that skip what
    nobody sees (on CPUs they are interpreted, to be looked at); `cudnn`, NVIDIA's with a mask of rows' length squared,
    in bfloat16. `auto`: flash in bfloat16 on a GPU or TPU, or else xla; a run says at its start which it is."""
    moe: Mixture = Mixture()

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.random is None):
            raise ValueError(
                "give exactly one of model.path (a folder or a fetchable name) and model.random; "
                "an override sets the other to null (model.random=null)"
            )
        return self
