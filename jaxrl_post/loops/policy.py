"""A policy to sample from: the weights of a recipe's model or of a run, with the tokenizer they belong to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_post.loops.network import Network, build_network, initial_params, rollout_params
from jaxrl_post.loops.run_folder import Which, saved_params
from jaxrl_post.models.decoder import Params
from jaxrl_post.models.huggingface import open_checked
from jaxrl_post.models.zoo import resolve
from sharding.placement import placed_shapes


@dataclasses.dataclass(frozen=True)
class Policy:
    """`params` are in the rollout layout; `source` says where they come from."""

    config: Config | OfflineConfig
    tokenizer: Tokenizer
    network: Network
    params: Params
    source: str

    @property
    def stop_ids(self) -> frozenset[int]:
        own = self.config.rollout.stop_token_ids if isinstance(self.config, Config) else ()
        return self.tokenizer.stop_ids | set(own)


def load_policy(config: Config | OfflineConfig, weights: Path | None, which: Which = None) -> Policy:
    """The recipe's own model, or weights of the run in `weights`.

    Raises: ValueError or FileNotFoundError for a recipe without a language model, a model that cannot be read, and as
    `saved_params`.
    """
    if config.algorithm.kind == "reward_model":
        raise ValueError(
            "algorithm.kind=reward_model trains a scalar head, which samples no text: give a recipe or run of another "
            "algorithm.kind"
        )
    folder = None if config.model.path is None else resolve(config.model.path)
    tokenizer = load_tokenizer(folder)
    network = build_network(config, folder, tokenizer)
    if folder is not None:
        open_checked(folder, network.model)
    params, source = policy_params(network, config.seed, weights, which)
    return Policy(config, tokenizer, network, rollout_params(network, params), source)


def policy_params(network: Network, seed: int, weights: Path | None, which: Which = None) -> tuple[Params, str]:
    """The network's first weights or those of a run, in the training layout, and what they are called."""
    if weights is None:
        return initial_params(network, seed), str(network.folder or "a random model")
    params, step = saved_params(weights, placed_shapes(network.abstract_params, network.shardings()), which)
    return params, f"{weights}, step {step}"
