"""A recipe's decoder on its mesh: shapes and layouts first, weights when asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.config_ppo import PPO
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.deterministic import VARIABLE, lacking
from jaxrl_post.loops.decoder_shape import model_config
from jaxrl_post.models import backends, exchange, scalar_head, sequence
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Decoder, Params, abstract, split
from jaxrl_post.models.huggingface import load_params
from sharding.memory import check_host_memory
from sharding.mesh import AXES, make_mesh, platform, resolve_sizes
from sharding.placement import Tree, placed_shapes, reshard, tree_shardings
from sharding.rules import ROLLOUT, ZERO, Rules, Stage


@dataclasses.dataclass(frozen=True)
class Network:
    """A decoder, for a reward model with its head, on a mesh: shapes and layouts, no weights.

    `folder` is that of the model's files, None for a random model. With a head, parameters are {"decoder", "head"}.
    """

    folder: Path | None
    model: ModelConfig
    graphdef: nnx.GraphDef
    abstract_params: Params
    axes: Tree
    mesh: Mesh
    has_head: bool
    stage: Stage = ZERO[3]
    """The layouts of weights and gradients in training."""

    def shardings(self, rules: Rules | None = None) -> Tree:
        """Of the parameters, in training unless told. Raises: ValueError for sizes that the mesh does not divide."""
        return tree_shardings(self.axes, self.abstract_params, rules or self.stage.weights, self.mesh)

    @property
    def shares_weights(self) -> bool:
        """Whether rollouts read the training arrays themselves: neither layout nor dtype differ."""
        return self.shardings() == self.shardings(ROLLOUT) and self.model.param_dtype == self.model.dtype

    def rollout_shapes(self) -> Params:
        """The parameters as rollouts read them: shapes in the compute dtype, with shardings."""
        dtype = jnp.dtype(self.model.dtype)
        cast = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), self.abstract_params)
        return placed_shapes(cast, self.shardings(ROLLOUT))


def build_network(
    config: Config | OfflineConfig,
    folder: Path | None,
    tokenizer: Tokenizer,
    devices: Sequence[jax.Device] | None = None,
) -> Network:
    """The model of a recipe on the mesh it asks for, of this job's devices or those given, which need not be attached.

    Raises: ValueError for sizes that do not divide, heads that `training.sequence_attention` exchanges among them, for
    an attention backend that cannot serve, and for tokens to exchange where no other device holds experts.
    """
    mesh = mesh_of(config, jax.devices() if devices is None else devices)
    model = model_config(config, folder, tokenizer.vocab_size, platform(mesh), mesh.shape["tensor"])
    model = _over_experts(_over_columns(model, config, mesh), config, mesh)
    _check_sums(model, mesh)
    _check_same_bits(config, mesh)
    _check_offload(config, mesh)
    graphdef, params, axes = abstract(model)
    has_head = config.algorithm.kind == "reward_model"
    if has_head:
        params = {"decoder": params, "head": scalar_head.abstract_head(model)}
        axes = {"decoder": axes, "head": scalar_head.AXES}
    network = Network(folder, model, graphdef, params, axes, mesh, has_head, ZERO[config.mesh.zero])
    network.shardings()
    return network


def check_positions(network: Network, asked: Mapping[str, int]) -> None:
    """Raises: ValueError when the lengths asked for, by their keys, exceed the model's positions together."""
    limit, total = network.model.max_positions, sum(asked.values())
    if total > limit:
        keys = " + ".join(f"{key}={value}" for key, value in asked.items())
        raise ValueError(
            f"{keys}{f' = {total}' if len(asked) > 1 else ''} exceeds the model's {limit} positions: lower "
            f"{'one' if len(asked) > 1 else 'it'}"
        )


def check_ids(network: Network, sequences: Iterable[tuple[str, Iterable[int]]]) -> None:
    """Raises: ValueError for an id of a sequence, named by its text, that has no embedding of its own."""
    for text, ids in sequences:
        if (highest := max(ids, default=0)) >= network.model.vocab_size:
            raise ValueError(
                f"{network.folder}: its tokenizer gives id {highest} for {text}, outside the model's vocabulary of "
                f"{network.model.vocab_size}: tokenizer and weights do not belong together"
            )


def mesh_of(config: Config | OfflineConfig, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh a recipe asks for. Raises: ValueError as `resolve_sizes`."""
    return make_mesh(mesh_sizes(config, len(devices)), devices)


def mesh_sizes(config: Config | OfflineConfig, devices: int) -> dict[str, int]:
    """The size of every axis on so many devices. Raises: ValueError as `resolve_sizes`."""
    asked = {axis: getattr(config.mesh, axis) for axis in AXES}
    return resolve_sizes(asked, devices, config.mesh.allow_unused_devices)


def _over_columns(model: ModelConfig, config: Config | OfflineConfig, mesh: Mesh) -> ModelConfig:
    asked, s, tensor = config.training.sequence_attention, mesh.shape["sequence"], mesh.shape["tensor"]
    kind = sequence.choose(asked, model.heads, model.kv_heads, s, tensor)
    backend = backends.choose(config.model.attention, model, model.platform, ring=s > 1 and kind == "ring")
    return dataclasses.replace(model, sequence_attention=kind, attention=backend)


def _over_experts(model: ModelConfig, config: Config | OfflineConfig, mesh: Mesh) -> ModelConfig:
    if model.moe is None:
        return model
    dispatch = exchange.choose(config.model.moe.dispatch, model.moe, mesh.shape["expert"], platform(mesh))
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, dispatch=dispatch))


def check_row(network: Network, length: int) -> None:
    """Raises: ValueError when packed rows of so many positions cannot be cut over `mesh.sequence`, or are none for the
    attention backend."""
    sequence.check_length(network.model.sequence_attention, length, network.mesh.shape["sequence"])
    backends.check_length(network.model, length)


def _check_sums(model: ModelConfig, mesh: Mesh) -> None:
    """Raises: ValueError where XLA's CPU backend would abort: it cannot sum experts' bfloat16 outputs over devices."""
    wide = [axis for axis in ("expert", "tensor") if mesh.shape[axis] > 1]
    if platform(mesh) == "cpu" and model.moe and wide and model.dtype == "bfloat16":
        axis = wide[0]
        raise ValueError(
            f"model.dtype=bfloat16 with mesh.{axis}={mesh.shape[axis]} does not run on CPUs, where XLA cannot sum "
            f"experts' bfloat16 over devices: set model.dtype=float32, or mesh.{axis}=1"
        )


def _check_same_bits(config: Config | OfflineConfig, mesh: Mesh) -> None:
    """Raises: ValueError where a deterministic run's compiler was not asked for it; `python -m launch` asks it."""
    if config.debug.deterministic and platform(mesh) == "gpu" and (flags := lacking()):
        raise ValueError(
            f"debug.deterministic=true needs {' '.join(flags)} in {VARIABLE} before jax starts: start the run with "
            "python -m launch, which adds them"
        )


def _check_offload(config: Config | OfflineConfig, mesh: Mesh) -> None:
    """Raises: ValueError where a setting keeps something in a host's memory that devices do not reach."""
    remat, sections = config.model.remat, {"optimizer": config.optimizer}
    if isinstance(config.algorithm, PPO):
        sections["algorithm.critic"] = config.algorithm.critic
    if remat.endswith("_offload"):
        check_host_memory(mesh, f"model.remat={remat}", f"model.remat={remat.removesuffix('_offload')}")
    for name, section in sections.items():
        if section.offload:
            check_host_memory(mesh, f"{name}.offload=true", f"{name}.offload=false")


def initial_params(network: Network, seed: int) -> Params:
    """The weights a run starts from, in the training layout: read from the folder or drawn from the seed; a head is
    always drawn."""
    shardings = network.shardings()
    decoder = decoder_params(
        network.folder, network.model, seed, shardings["decoder"] if network.has_head else shardings
    )
    if not network.has_head:
        return decoder
    draw_head = jax.jit(lambda key: scalar_head.init_head(network.model, key), out_shardings=shardings["head"])
    return {"decoder": decoder, "head": draw_head(jax.random.fold_in(jax.random.key(seed), 1))}


def rollout_params(network: Network, params: Params) -> Params:
    """The weights as the sampler reads them: the rollout layout, cast to the compute dtype once and not at each use.

    Where neither layout nor dtype differ these are the training arrays themselves.
    """
    return params if network.shares_weights else reshard(params, network.shardings(ROLLOUT), network.model.dtype)


def decoder_params(folder: Path | None, model: ModelConfig, seed: int, shardings: Tree) -> Params:
    """A decoder's first weights on `shardings`: those of the folder, or for None drawn from the seed."""
    if folder is not None:
        return load_params(folder, model, shardings)
    draw = jax.jit(lambda key: split(Decoder(model, key))[1], out_shardings=shardings)
    return draw(jax.random.key(seed))
