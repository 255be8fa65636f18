"""What an offline run needs before its first step: examples, mesh, model and its parameters.

Everything a user can get wrong is checked here, before any device holds a weight.
"""

from __future__ import annotations

import dataclasses
import logging

import jax

from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.data.preferences import Report, load_examples
from jaxrl_post.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_post.loops.network import Network, build_network, decoder_params
from jaxrl_post.models import scalar_head
from jaxrl_post.models.decoder import Params
from jaxrl_post.models.zoo import resolve
from jaxrl_post.types_offline import Example

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class OfflineJob:
    """The fixed parts of a run; nothing in it changes from step to step."""

    config: OfflineConfig
    network: Network
    tokenizer: Tokenizer
    examples: list[Example]
    report: Report


def build(config: OfflineConfig) -> OfflineJob:
    """Raises ValueError or FileNotFoundError for whatever the config asks for that cannot be had."""
    folder = None if config.model.path is None else resolve(config.model.path)
    tokenizer = load_tokenizer(folder)
    examples, report, skipped = load_examples(config, tokenizer)
    for line in skipped:
        log.warning("skipped %s", line)
    if report.dropped:
        log.warning(
            "%d of %d examples lost all tokens of an answer to data.max_tokens=%d and were dropped",
            report.dropped, report.dropped + report.kept, config.data.max_tokens,
        )  # fmt: skip
    network = build_network(config, folder, tokenizer)
    if config.data.max_tokens > network.model.max_positions:
        raise ValueError(
            f"data.max_tokens={config.data.max_tokens} exceeds the model's {network.model.max_positions} positions: "
            "lower it"
        )
    highest = max(max(ids, default=0) for example in examples for ids in example.ids)
    if highest >= network.model.vocab_size:
        raise ValueError(
            f"{folder}: its tokenizer gives id {highest}, outside the model's vocabulary of {network.model.vocab_size}"
        )
    return OfflineJob(config, network, tokenizer, examples, report)


def initial_params(network: Network, seed: int) -> Params:
    """The weights a run starts from, in the training layout: read from the folder or drawn from the seed; a head is
    always drawn."""
    shardings = network.shardings()
    decoder_shardings = shardings["decoder"] if network.has_head else shardings
    decoder = decoder_params(network.folder, network.model, seed, decoder_shardings)
    if not network.has_head:
        return decoder
    draw_head = jax.jit(lambda key: scalar_head.init_head(network.model, key), out_shardings=shardings["head"])
    return {"decoder": decoder, "head": draw_head(jax.random.fold_in(jax.random.key(seed), 1))}
