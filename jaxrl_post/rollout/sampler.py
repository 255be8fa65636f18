"""From lists of prompts to lists of completions: pads, places, runs the engine, cuts its answer into records.

P prompts, G samples each, N = P·G requests, W prompt width.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Params
from jaxrl_post.rollout.engine import make_rollout
from jaxrl_post.rollout.records import Requests, Samples
from jaxrl_post.rollout.sampling import Sampling
from jaxrl_post.rollout.schedule import EngineShape, SampleOptions, cache_memory, engine_shape
from jaxrl_post.types import Completion, StopReason
from sharding.mesh import BATCH_AXES, batch_shards
from sharding.placement import place

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Completions in prompt order (G for each prompt), and how many decode steps and refills each replica ran."""

    completions: list[Completion]
    decode_steps: tuple[int, ...]
    refills: tuple[int, ...]


class Sampler:
    """Samples from parameters it is handed; holds the compiled rollouts, one for each shape, and no weights."""

    def __init__(self, graphdef: nnx.GraphDef, config: ModelConfig, mesh: Mesh, stop_ids: Collection[int]):
        """`stop_ids` end a completion and are part of it; ids outside the vocabulary are a ValueError."""
        outside = sorted(i for i in stop_ids if not 0 <= i < config.vocab_size)
        if outside:
            raise ValueError(f"stop ids {outside} are outside the vocabulary of {config.vocab_size}")
        self._graphdef, self._config, self._mesh = graphdef, config, mesh
        self._memory = cache_memory(mesh.shape["tensor"])
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._compiled: dict[EngineShape, Callable[..., Samples]] = {}

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        options: SampleOptions,
        *,
        seed: int,
        step: int,
        width: int | None = None,
        limits: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Rollout:
        """Sample `options.samples_per_prompt` completions of every prompt.

        Args:
          params: in the rollout layout (`sharding.rules.ROLLOUT`).
          prompts: token ids, none empty.
          seed, step: with a request's number and the position they key every draw.
          width: columns for prompts, fixed by a caller that wants one compile; None is the next power of two.
          limits: new tokens allowed to each request (N of them), at most `max_new_tokens`; None gives all that.
          seeds: a seed for each request (N of them) instead of `seed`.

        Raises: ValueError for an empty prompt, one longer than `width`, more positions than the model has, and
        log-probs that are not finite.
        """
        if not prompts or options.max_new_tokens == 0:
            return self._nothing(len(prompts) * options.samples_per_prompt, options)
        width = self._checked_width(prompts, options, width)
        requests = self._requests(prompts, options, width, seed, limits, seeds)
        prompts_each = len(requests.lengths) // batch_shards(self._mesh)
        shape = engine_shape(prompts_each, options, width, requests.options, self._config, self._memory)
        if shape not in self._compiled:
            log.info("rollout of %d prompts a replica: %s", prompts_each, shape.describe())
            self._compiled[shape] = make_rollout(self._graphdef, shape, self._mesh)
        sharded = NamedSharding(self._mesh, PartitionSpec(BATCH_AXES))
        whole = NamedSharding(self._mesh, PartitionSpec())
        placed = place(requests, jax.tree.map(lambda _: sharded, requests))
        stop_ids, step_array = place((self._stop_ids, np.int32(step)), (whole, whole))
        samples = jax.device_get(self._compiled[shape](params, placed, stop_ids, step_array))
        rollout = _completions(samples, len(prompts), options.samples_per_prompt)
        if not all(np.isfinite([c.logp, c.raw_logp]).all() for c in rollout.completions):
            raise ValueError(
                f"the model's log-probs at step {step} are not finite: its weights are not, or training diverged; "
                "check the model's files, or go on from an earlier checkpoint with a lower optimizer.learning_rate"
            )
        return rollout

    def _nothing(self, count: int, options: SampleOptions) -> Rollout:
        none = np.zeros(0, np.float32)
        empty = [
            Completion(i // options.samples_per_prompt, none.astype(np.int32), none, none, StopReason.LENGTH)
            for i in range(count)
        ]
        return Rollout(empty, (0,), (0,))

    def _checked_width(self, prompts: Sequence[Sequence[int]], options: SampleOptions, width: int | None) -> int:
        lengths = [len(p) for p in prompts]
        if min(lengths) == 0:
            raise ValueError(f"prompt {lengths.index(0)} has no tokens, and the tokenizer adds none at its start")
        longest = max(lengths)
        width = width or max(8, 1 << (longest - 1).bit_length())
        if longest > width:
            raise ValueError(f"prompt {lengths.index(longest)} has {longest} tokens, the cache holds {width}")
        if longest + options.max_new_tokens > self._config.max_positions:
            raise ValueError(
                f"a prompt of {longest} tokens and {options.max_new_tokens} new ones exceed the model's "
                f"{self._config.max_positions} positions: lower data.max_prompt_tokens or rollout.max_new_tokens"
            )
        return width

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        options: SampleOptions,
        width: int,
        seed: int,
        limits: Sequence[int] | None,
        seeds: Sequence[int] | None,
    ) -> Requests:
        """Padded with prompts that ask for no token until every replica has equally many."""
        P, G = len(prompts), options.samples_per_prompt
        padded = -(-P // batch_shards(self._mesh)) * batch_shards(self._mesh)
        tokens, lengths = np.zeros((padded, width), np.int32), np.ones(padded, np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)], lengths[i] = prompt, len(prompt)
        all_limits, all_seeds = np.zeros(padded * G, np.int32), np.full(padded * G, seed, np.uint32)
        all_limits[: P * G] = options.max_new_tokens if limits is None else limits
        if all_limits.max() > options.max_new_tokens or all_limits.min() < 0:
            raise ValueError(f"limits must lie in 0…max_new_tokens={options.max_new_tokens}")
        if seeds is not None:
            all_seeds[: P * G] = seeds
        full = lambda value, dtype: np.full(padded * G, value, dtype)
        sampling = Sampling(
            full(options.temperature, np.float32), full(options.top_k, np.int32), full(options.top_p, np.float32)
        )
        return Requests(tokens, lengths, np.arange(padded * G, dtype=np.int32), all_seeds, all_limits, sampling)


def _completions(samples: Samples, prompts: int, group: int) -> Rollout:
    def cut(i: int) -> Completion:
        n = int(samples.lengths[i])
        reason = StopReason(int(samples.stops[i])) if samples.stops[i] else StopReason.LENGTH
        return Completion(i // group, samples.tokens[i, :n], samples.logp[i, :n], samples.raw_logp[i, :n], reason)

    return Rollout(
        [cut(i) for i in range(prompts * group)],
        tuple(int(n) for n in samples.decode_steps),
        tuple(int(n) for n in samples.refills),
    )
