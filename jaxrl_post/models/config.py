"""What a decoder is: one frozen record, read from a Hugging Face `config.json`. Families are data, not classes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

Family = Literal["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"]
Backend = Literal["xla", "flash", "cudnn"]
Dispatch = Literal["gather", "ragged", "padded"]
Remat = Literal["none", "full", "dots", "full_offload", "dots_offload"]
ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
# What a family's config.json means by a key that it lacks, where families differ.
DEFAULTS: dict[Family, dict[str, Any]] = {"mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5}}


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1: long wavelengths divided by `factor`, a smooth band between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture in the place of each layer's MLP: a token goes to `per_token` of `count` experts of width `size`.

    shared_size: width of the expert that every token goes to, behind a gate of its own (Qwen2-MoE); 0: there is none.
    normalized: a token's gates add up to 1 (`norm_topk_prob`).
    backend, dispatch, whole: no part of the architecture, but how the products of `models.moe` are computed, how tokens
    come to experts on other devices, by a gather or by an exchange (`models.exchange`), and whether an update finds the
    weights whole on each device but for the experts, or cut as in `sharding.rules.TRAIN`.
    """

    count: int
    per_token: int
    size: int
    shared_size: int = 0
    normalized: bool = True
    backend: Literal["blocked", "ragged", "grouped", "interpreted"] = "blocked"
    dispatch: Dispatch = "gather"
    whole: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(f"{self.per_token} experts a token, of {self.count}: give 1 to {self.count}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture and numerics of a decoder. Hashable, so it can be static under `jax.jit`."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Rope | None = None
    norm_eps: float = 1e-6
    max_positions: int = 2048
    tie_embeddings: bool = False
    initializer_range: float = 0.02
    dtype: str = "float32"
    """Compute dtype; norms, rope, softmax and logits are float32 whatever it is."""
    param_dtype: str = "float32"
    remat: Remat = "none"
    scan_layers: bool = True
    """One layer compiled and looped over, or all of them in a row: longer to compile, faster on CPUs."""
    moe: Experts | None = None
    attention: Backend = "xla"
    """How packed rows attend (`models.backends`)."""
    platform: str = "cpu"
    """cpu, gpu or tpu: whose kernels `flash` takes."""
    sequence_attention: Literal["ring", "ulysses"] = "ring"
    """How attention reaches columns on other devices where rows are cut along time (`models.sequence`)."""

    @property
    def qkv_bias(self) -> bool:
        return self.family in ("qwen2", "qwen2_moe")

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def active_width(self) -> int:
        """F of all that one token goes through in a layer."""
        moe = self.moe
        return self.intermediate_size if moe is None else moe.per_token * moe.size + moe.shared_size

    def parameter_count(self) -> int:
        """Unique parameters; a tied embedding counts once."""
        D, H, K, N, moe = self.hidden_size, self.heads, self.kv_heads, self.head_dim, self.moe
        layer = D * (2 * H + 2 * K) * N + 2 * D
        if moe is None:
            layer += 3 * D * self.intermediate_size
        else:
            layer += moe.count * (D + 3 * D * moe.size) + (3 * D * moe.shared_size + D) * (moe.shared_size > 0)
        layer += self.qkv_bias * (H + 2 * K) * N + self.qk_norm * 2 * N
        return self.layers * layer + D + self.vocab_size * D * (1 if self.tie_embeddings else 2)


def from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a `config.json`; anything that would change the numbers and is not implemented is refused by name.

    Raises:
      ValueError: unsupported architecture, rope type, activation, bias, sliding window or layers without experts among
        others with, or a missing key.
    """
    architectures = raw.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else architectures
    family = ARCHITECTURES.get(str(named))
    if family is None:
        raise ValueError(f"architecture {named!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    raw = DEFAULTS.get(family, {}) | dict(raw)
    _refuse_unsupported(raw, family)

    theta, scaling = _rope(raw)
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    # Qwen3's heads have a width of their own; older families' follows unless they say otherwise.
    head_dim = _positive(raw, "head_dim", None if family == "qwen3" else hidden // heads)
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"config.json: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}, "
            f"and head_dim={head_dim} must be even"
        )
    return ModelConfig(
        family=family,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        layers=_positive(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        max_positions=_positive(raw, "max_position_embeddings", 2048),
        tie_embeddings=_flag(raw, "tie_word_embeddings", False),
        initializer_range=_number(raw, "initializer_range", 0.02),
        moe=_experts(raw, family),
    )


def to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a decoder that was not read from one; `from_huggingface` undoes it, numerics aside."""
    scaling = config.rope_scaling
    raw = {
        "architectures": [next(name for name, family in ARCHITECTURES.items() if family == config.family)],
        "model_type": config.family,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
    }
    return raw | (_experts_to_huggingface(config.family, config.moe) if config.moe else {})


def _experts(raw: Mapping[str, Any], family: Family) -> Experts | None:
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe"):
        return None
    count = _positive(raw, "num_local_experts" if raw.get("num_experts") is None else "num_experts")
    per_token = _positive(raw, "num_experts_per_tok")
    if per_token > count:
        raise ValueError(f"config.json: num_experts_per_tok={per_token} exceeds the {count} experts there are")
    if family == "mixtral":
        return Experts(count, per_token, _positive(raw, "intermediate_size"))
    return Experts(
        count,
        per_token,
        _positive(raw, "moe_intermediate_size"),
        shared_size=_positive(raw, "shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
        normalized=_flag(raw, "norm_topk_prob", False),
    )


def _experts_to_huggingface(family: Family, moe: Experts) -> dict[str, Any]:
    if family == "mixtral":
        return {"num_local_experts": moe.count, "num_experts_per_tok": moe.per_token, "intermediate_size": moe.size}
    raw = {
        "num_experts": moe.count,
        "num_experts_per_tok": moe.per_token,
        "moe_intermediate_size": moe.size,
        "norm_topk_prob": moe.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return raw | ({"shared_expert_intermediate_size": moe.shared_size} if family == "qwen2_moe" else {})


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json lacks {key!r}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key}={value!r}: expected a positive whole number")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {key}={value!r}: expected a positive number")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key}={value!r}: expected true or false")
    return value


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json: hidden_act={activation!r} is not supported; supported: silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if raw.get(key):
            raise ValueError(f"config.json: {key}={raw[key]!r} is not supported; remove it or use another model")
    if family in ("mixtral", "qwen2_moe", "qwen3_moe"):
        _refuse_unsupported_experts(raw, family)
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ValueError(f"config.json: layer_types={layer_types!r} is not supported; supported: full_attention")


def _refuse_unsupported_experts(raw: Mapping[str, Any], family: Family) -> None:
    only: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": (None, [])}
    only |= {"router_jitter_noise": (None, 0)}
    only |= {"sliding_window": (None,)} if family == "mixtral" else {}
    only |= {"qkv_bias": (True,)} if family == "qwen2_moe" else {}
    for key, allowed in only.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(f"config.json: {key}={raw[key]!r} is not supported; supported: {allowed[-1]!r}")


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Both spellings: `rope_theta` + `rope_scaling`, or one `rope_parameters` (transformers 5)."""
    parameters = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or parameters
    if not isinstance(parameters, Mapping) or not isinstance(scaling, Mapping):
        raise ValueError(f"config.json: rope_parameters={parameters!r}, rope_scaling={scaling!r}: expected objects")
    theta = _number({**raw, **parameters}, "rope_theta", 10_000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"config.json: rope type {kind!r} is not supported; supported: default, llama3")
    if _number({**raw, **parameters}, "partial_rotary_factor", 1.0) != 1:
        raise ValueError("config.json: partial_rotary_factor is not supported; supported: 1.0")
    if kind == "default":
        return theta, None
    return theta, Llama3Rope(
        factor=_number(scaling, "factor"),
        low_freq_factor=_number(scaling, "low_freq_factor"),
        high_freq_factor=_number(scaling, "high_freq_factor"),
        original_max_positions=_positive(scaling, "original_max_position_embeddings"),
    )
