"""What an offline run needs before its first step: examples, mesh, model and its parameters.

Everything a user can get wrong is checked here, before any device holds a weight.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Literal

from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.config_teachers import Taught
from jaxrl_post.data.preferences import Report, hold_out, load_examples
from jaxrl_post.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_post.loops.network import Network, build_network, check_ids, check_positions
from jaxrl_post.loops.teachers import Teacher, build_teachers
from jaxrl_post.models.huggingface import open_checked
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
    held_out: list[Example]
    report: Report
    """Of `data.path`, before any of it is held out."""
    teachers: tuple[Teacher, ...] = ()


def build(config: OfflineConfig) -> OfflineJob:
    """Raises ValueError or FileNotFoundError for whatever the config asks for that cannot be had."""
    folder = None if config.model.path is None else resolve(config.model.path)
    tokenizer = load_tokenizer(folder)
    examples, report = _loaded(config, tokenizer, "path")
    held_out: list[Example] = []
    if config.data.held_out_path is not None:
        held_out, _ = _loaded(config, tokenizer, "held_out_path")
    elif config.data.held_out_fraction > 0:
        examples, held_out = hold_out(examples, config.data.held_out_fraction, config.seed)
    held_out = held_out[: config.evaluation.max_examples] if config.evaluation.enabled else []
    network = build_network(config, folder, tokenizer)
    if folder is not None:
        open_checked(folder, network.model)
    check_positions(network, {"data.max_tokens": config.data.max_tokens})
    check_ids(network, ((f"an example of {config.data.path}", ids) for e in (*examples, *held_out) for ids in e.ids))
    taught = config.algorithm if isinstance(config.algorithm, Taught) else None
    teachers = build_teachers(taught, network, config.seed, tokenizer)
    for example in (*examples, *held_out) if teachers else ():
        teachers[example.lesson.teacher].check_positions(example.size)
    return OfflineJob(config, network, tokenizer, examples, held_out, report, teachers)


def _loaded(
    config: OfflineConfig, tokenizer: Tokenizer, key: Literal["path", "held_out_path"]
) -> tuple[list[Example], Report]:
    """The examples of one file, with a warning about those that are not among them."""
    examples, report, skipped = load_examples(config, tokenizer, key)
    for line in skipped:
        log.warning("skipped %s", line)
    if report.dropped:
        log.warning(
            "%d of %d examples of data.%s lost all tokens of an answer to data.max_tokens=%d and were dropped",
            report.dropped, report.dropped + report.kept, key, config.data.max_tokens,
        )  # fmt: skip
    return examples, report
