"""What a decoder is: one frozen record, read from a Hugging Face `config.json`. Families are data, not classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Family = Literal["llama", "qwen2", "qwen3"]
Remat = Literal["none", "full", "dots"]
ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1: long wavelengths divided by `factor`, a smooth band between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


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

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    def parameter_count(self) -> int:
        """Unique parameters; a tied embedding counts once."""
        D, H, K, N, F = self.hidden_size, self.heads, self.kv_heads, self.head_dim, self.intermediate_size
        layer = D * (2 * H + 2 * K) * N + 3 * D * F + 2 * D
        layer += self.qkv_bias * (H + 2 * K) * N + self.qk_norm * 2 * N
        return self.layers * layer + D + self.vocab_size * D * (1 if self.tie_embeddings else 2)


def from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a `config.json`; anything that would change the numbers and is not implemented is refused by name.

    Raises:
      ValueError: unsupported architecture, rope type, activation, bias or sliding window, or a missing key.
    """
    architectures = raw.get("architectures") or [None]
    family = ARCHITECTURES.get(str(architectures[0]))
    if family is None:
        raise ValueError(f"architecture {architectures[0]!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    _refuse_unsupported(raw)

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise ValueError(f"config.json of a {architectures[0]} lacks {key!r}")
        return raw[key]

    hidden, heads = int(need("hidden_size")), int(need("num_attention_heads"))
    theta, scaling = _rope(raw)
    return ModelConfig(
        family=family,
        vocab_size=int(need("vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(need("intermediate_size")),
        layers=int(need("num_hidden_layers")),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=int(raw.get("max_position_embeddings", 2048)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        initializer_range=float(raw.get("initializer_range", 0.02)),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json: hidden_act={activation!r} is not supported; supported: silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(key):
            raise ValueError(f"config.json: {key}={raw[key]!r} is not supported; supported: false")


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Both spellings: `rope_theta` + `rope_scaling`, or one `rope_parameters` (transformers 5)."""
    parameters = raw.get("rope_parameters") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    scaling = raw.get("rope_scaling") or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"config.json: rope type {kind!r} is not supported; supported: default, llama3")
    return theta, Llama3Rope(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_positions=int(scaling["original_max_position_embeddings"]),
    )
