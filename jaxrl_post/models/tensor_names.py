"""Each of our weights and its tensor in a Hugging Face checkpoint: one table, read in both directions.

A torch Linear stores [out, in] with heads and their width merged; ours keep [in, heads, width] apart. `dims` says which
of our dims, in order, make each of theirs: q [D, H, N] under ((1, 2), (0,)) is their [H·N, D]. The leading L of stacked
weights and the E of experts are not counted: there is one tensor for each layer and expert.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl_post.models.config import Family

Bounds = Sequence[tuple[int, int]]
VECTOR, MATRIX, LINEAR = ((0,),), ((0,), (1,)), ((1,), (0,))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor's name, with `{layer}` where there is one per layer and `{expert}` where there is one per expert of it,
    and how its dims are made of ours."""

    name: str
    dims: tuple[tuple[int, ...], ...]

    @property
    def stacked(self) -> int:
        """Our leading dims that are spread over tensors."""
        return ("{layer}" in self.name) + ("{expert}" in self.name)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(dim for group in self.dims for dim in group)

    def name_at(self, index: Sequence[int]) -> str:
        """Of the part at an index of the leading dims."""
        return self.name.format(**dict(zip(("layer", "expert"), index, strict=False)))

    def names(self, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Index and name of each part of a weight whose shape here is `shape`."""
        for index in itertools.product(*map(range, shape[: self.stacked])):
            yield index, self.name_at(index)

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of a weight whose shape here, without its leading dims, is `shape`."""
        return tuple(math.prod(shape[dim] for dim in group) for group in self.dims)

    def to_theirs(self, ours: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(ours.transpose(self.order)).reshape(self.their_shape(ours.shape))

    def their_slices(self, shape: Sequence[int], bounds: Bounds) -> tuple[slice, ...]:
        """The smallest rectangle of their tensor that holds our elements within `bounds`."""
        inner = [math.prod(shape[dim] for dim in group[1:]) for group in self.dims]
        outer = [bounds[group[0]] for group in self.dims]
        return tuple(slice(start * n, stop * n) for (start, stop), n in zip(outer, inner, strict=True))

    def to_ours(self, part: np.ndarray, shape: Sequence[int], bounds: Bounds) -> np.ndarray:
        """Our elements within `bounds`, from the rectangle `their_slices` asks for."""
        first = {group[0] for group in self.dims}
        sizes = [bounds[dim][1] - bounds[dim][0] if dim in first else shape[dim] for dim in self.order]
        ours = part.reshape(sizes).transpose(np.argsort(self.order))
        return ours[tuple(slice(None) if dim in first else slice(*bounds[dim]) for dim in range(len(shape)))]


TENSORS = {
    "embed": Tensor("model.embed_tokens.weight", MATRIX),
    "layers/attention_norm": Tensor("model.layers.{layer}.input_layernorm.weight", VECTOR),
    "layers/q": Tensor("model.layers.{layer}.self_attn.q_proj.weight", ((1, 2), (0,))),
    "layers/k": Tensor("model.layers.{layer}.self_attn.k_proj.weight", ((1, 2), (0,))),
    "layers/v": Tensor("model.layers.{layer}.self_attn.v_proj.weight", ((1, 2), (0,))),
    "layers/o": Tensor("model.layers.{layer}.self_attn.o_proj.weight", ((2,), (0, 1))),
    "layers/q_bias": Tensor("model.layers.{layer}.self_attn.q_proj.bias", ((0, 1),)),
    "layers/k_bias": Tensor("model.layers.{layer}.self_attn.k_proj.bias", ((0, 1),)),
    "layers/v_bias": Tensor("model.layers.{layer}.self_attn.v_proj.bias", ((0, 1),)),
    "layers/q_norm": Tensor("model.layers.{layer}.self_attn.q_norm.weight", VECTOR),
    "layers/k_norm": Tensor("model.layers.{layer}.self_attn.k_norm.weight", VECTOR),
    "layers/mlp_norm": Tensor("model.layers.{layer}.post_attention_layernorm.weight", VECTOR),
    "layers/gate": Tensor("model.layers.{layer}.mlp.gate_proj.weight", LINEAR),
    "layers/up": Tensor("model.layers.{layer}.mlp.up_proj.weight", LINEAR),
    "layers/down": Tensor("model.layers.{layer}.mlp.down_proj.weight", LINEAR),
    "layers/router": Tensor("model.layers.{layer}.mlp.gate.weight", LINEAR),
    "layers/expert_gate": Tensor("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", LINEAR),
    "layers/expert_up": Tensor("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", LINEAR),
    "layers/expert_down": Tensor("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", LINEAR),
    "layers/shared_gate": Tensor("model.layers.{layer}.mlp.shared_expert.gate_proj.weight", LINEAR),
    "layers/shared_up": Tensor("model.layers.{layer}.mlp.shared_expert.up_proj.weight", LINEAR),
    "layers/shared_down": Tensor("model.layers.{layer}.mlp.shared_expert.down_proj.weight", LINEAR),
    "layers/shared_scale": Tensor("model.layers.{layer}.mlp.shared_expert_gate.weight", LINEAR),
    "norm": Tensor("model.norm.weight", VECTOR),
    "head": Tensor("lm_head.weight", MATRIX),
}
MIXTRAL = {
    "layers/router": Tensor("model.layers.{layer}.block_sparse_moe.gate.weight", LINEAR),
    "layers/expert_gate": Tensor("model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight", LINEAR),
    "layers/expert_up": Tensor("model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight", LINEAR),
    "layers/expert_down": Tensor("model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight", LINEAR),
}


def tensors_of(family: Family) -> dict[str, Tensor]:
    """The tensor of each of our weights, as the family's checkpoints name it."""
    return TENSORS | MIXTRAL if family == "mixtral" else TENSORS
