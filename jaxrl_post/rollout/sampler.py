"""From lists of prompts to lists of completions: pads, places, runs the engine, cuts its answer into records.

P prompts, G samples each, N = P·G requests, W prompt width.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Traced

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Params, abstract
from jaxrl_post.models.moe import replica_specs
from jaxrl_post.rollout.cache import Caches
from jaxrl_post.rollout.decoding import Decoding, check, check_ids
from jaxrl_post.rollout.engine import make_rollout
from jaxrl_post.rollout.partial import Partial, with_versions
from jaxrl_post.rollout.parts import Finished, Hear, Told, finished, make_rollout_in_parts, trace_parts
from jaxrl_post.rollout.records import Requests, Samples, started, with_choices
from jaxrl_post.rollout.requests import padded_requests, strings_of
from jaxrl_post.rollout.schedule import EngineShape, SampleOptions, cache_memory, engine_shape
from jaxrl_post.rollout.stop_strings import Automaton, bytes_of_all, compile_strings, completed_by_last
from jaxrl_post.types import Completion, StopReason
from sharding.mesh import BATCH_AXES, batch_shards, platform
from sharding.placement import place, placed_shapes
from sharding.processes import exchange, fetch

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Completions in prompt order (G for each prompt), and how many decode steps and refills each replica ran."""

    completions: list[Completion]
    decode_steps: tuple[int, ...]
    refills: tuple[int, ...]


class Sampler:
    """Samples from parameters it is handed; holds the compiled rollouts, one for each shape, and no weights."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: ModelConfig,
        mesh: Mesh,
        stop_ids: Collection[int],
        token_bytes: Sequence[bytes] = (),
        device_memory: float | None = None,
    ):
        """`stop_ids` end a completion and are part of it; ids outside the vocabulary are a ValueError. `token_bytes`,
        what each id adds to the text, is needed for stop strings alone (`data.token_bytes`). `device_memory` in bytes
        is that of devices which are not attached."""
        check_ids("stop ids", stop_ids, config.vocab_size)
        self._graphdef, self._config, self._mesh = graphdef, config, mesh
        self._memory = cache_memory(mesh.shape["tensor"], device_memory)  # which shapes the program
        if device_memory is None:
            self._memory = min(exchange(self._memory))
        self._specs = replica_specs(abstract(config)[2])
        self._stop_ids = frozenset(stop_ids)
        self._token_bytes = bytes_of_all(token_bytes, config.vocab_size)
        self._automata: dict[tuple[str, ...], Automaton] = {}
        self._compiled: dict[tuple[EngineShape, bool], Callable[..., Samples]] = {}  # in parts or not

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
        each: Sequence[Decoding] | None = None,
        partial: Partial | None = None,
        hear: Callable[[Sequence[Finished]], None] | None = None,
    ) -> Rollout:
        """Sample `options.samples_per_prompt` completions of every prompt.

        Args:
          params: in the rollout layout (`sharding.rules.ROLLOUT`).
          prompts: token ids, none empty.
          seed, step: with a request's number and the position they key every draw.
          width: columns for prompts, fixed by a caller that wants one compile; None is the next power of two.
          limits: new tokens allowed to each request (N of them), at most `max_new_tokens`; None gives all that.
          seeds: a seed for each request (N of them) instead of `seed`.
          each: how each request is decoded (N of them) instead of what `options` says for all.
          partial: where each request begins, with its own keys, and when the rollout stops; None samples all in full.
          hear: told from time to time which requests of this process's devices have finished, each once, while others
            are sampled, by a rollout in parts; of the last ones it is not told. None is a rollout in one program.

        Raises: ValueError for an empty prompt, one longer than `width`, more positions than the model has, options out
        of range, stop strings without `token_bytes`, more likeliest ids than an earlier rollout has kept of a request,
        and log-probs that are not finite.
        """
        if not prompts or options.max_new_tokens == 0:
            return self._nothing(len(prompts) * options.samples_per_prompt, options)
        width = self._checked_width(prompts, options, width)
        decoding = each or [options] * (len(prompts) * options.samples_per_prompt)
        strings = self._checked_strings(each or [options])
        tops = [d.top_logprobs for d in decoding]
        options = dataclasses.replace(options, top_logprobs=max(tops))
        replicas = batch_shards(self._mesh)
        requests = padded_requests(
            prompts, decoding, options, width=width, replicas=replicas, stop_ids=self._stop_ids, seed=seed,
            limits=limits, seeds=seeds,
        )  # fmt: skip
        if partial:
            check_stops_early(self._config, self._mesh)
            requests = started(requests, partial, tops, options.max_new_tokens, replicas)
        lengths = requests.lengths
        shape = self._shape(requests, options, width, partial)
        known = (shape, hear is not None)
        if known not in self._compiled:
            parts = ", in several programs" if hear else ""
            log.info("rollout of %d prompts a replica: %s%s", len(lengths) // replicas, shape.describe(), parts)
            make = make_rollout_in_parts if hear else make_rollout
            self._compiled[known] = make(self._graphdef, shape, self._mesh, self._specs)
        sharded, whole = self._layouts()
        placed = place(requests, jax.tree.map(lambda _: sharded, requests))
        automaton = self._automata[strings] if strings else None
        automaton, step_array = place((automaton, np.int32(step)), jax.tree.map(lambda _: whole, (automaton, step)))
        told = (self._teller(decoding, hear),) if hear else ()
        samples = fetch(self._compiled[known](params, placed, automaton, step_array, *told))
        rollout = self._completions(samples, decoding, options.samples_per_prompt, partial, step)
        if samples.choices is not None:
            routed = with_choices(rollout.completions, samples, lengths)
            rollout = dataclasses.replace(rollout, completions=routed)
        if not all(np.isfinite([c.logp, c.raw_logp]).all() for c in rollout.completions):
            raise ValueError(
                f"the model's log-probs at step {step} are not finite: its weights are not, or training diverged; "
                "check the model's files, or go on from an earlier checkpoint with a lower optimizer.learning_rate"
            )
        return rollout

    def traced(self, params: Params, prompts: int, options: SampleOptions, width: int) -> tuple[EngineShape, Traced]:
        """The program of `generate` for so many full prompts and all samples in full, from abstract parameters in the
        rollout layout; nothing is allocated on a device."""
        shape, requests, step = self._abstract(prompts, options, width)
        program: Any = make_rollout(self._graphdef, shape, self._mesh, self._specs)
        return shape, program.trace(params, requests, None, step)

    def traced_parts(
        self, params: Params, prompts: int, options: SampleOptions, width: int
    ) -> tuple[EngineShape, list[tuple[Caches, Traced]]]:
        """As `traced`, of a rollout in parts: `parts.trace_parts`."""
        shape, *arguments = self._abstract(prompts, options, width)
        return shape, trace_parts(self._graphdef, shape, self._mesh, self._specs, params, *arguments)

    def _abstract(self, prompts: int, options: SampleOptions, width: int) -> tuple[EngineShape, Requests, Any]:
        """The shape of a rollout of full prompts, its requests and the step."""
        decoding = [options] * (prompts * options.samples_per_prompt)
        self._checked_strings([options])
        replicas, longest = batch_shards(self._mesh), [[0] * width] * prompts
        requests = padded_requests(
            longest, decoding, options, width=width, replicas=replicas, stop_ids=self._stop_ids, seed=0
        )
        sharded, whole = self._layouts()
        placed = placed_shapes(requests, jax.tree.map(lambda _: sharded, requests))
        step = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
        return self._shape(requests, options, width, None), placed, step

    def _shape(self, requests: Requests, options: SampleOptions, width: int, partial: Partial | None) -> EngineShape:
        return engine_shape(
            len(requests.lengths) // batch_shards(self._mesh),
            options,
            width,
            requests.options,
            self._config,
            self._memory,
            platform(self._mesh),
            partial.of if partial else None,
        )

    def _layouts(self) -> tuple[NamedSharding, NamedSharding]:
        """Of what replicas divide, and of what all have."""
        return NamedSharding(self._mesh, PartitionSpec(BATCH_AXES)), NamedSharding(self._mesh, PartitionSpec())

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

    def _checked_strings(self, decoding: Sequence[Decoding]) -> tuple[str, ...]:
        """The stop strings of all requests; their automaton is made when they are new."""
        for options in set(decoding):
            check(options, self._config.vocab_size)
        strings = strings_of(decoding)
        if strings and not self._token_bytes:
            raise ValueError(f"stop strings {list(strings)} need the bytes of the tokens: make the Sampler with them")
        if strings and strings not in self._automata:
            self._automata[strings] = compile_strings(strings, self._token_bytes)
        return strings

    def _completions(
        self, samples: Samples, decoding: Sequence[Decoding], group: int, partial: Partial | None, step: int
    ) -> Rollout:
        open_end = StopReason.UNFINISHED if partial else StopReason.LENGTH

        def cut(i: int, options: Decoding) -> Completion:
            n = int(samples.lengths[i])
            ids, reason = samples.tokens[i, :n], StopReason(int(samples.stops[i]) or open_end)
            return Completion(
                i // group,
                ids,
                samples.logp[i, :n],
                samples.raw_logp[i, :n],
                reason,
                self._stop_string(ids, reason, options),
                *((x[i, :n, : options.top_logprobs]) for x in (samples.top_ids, samples.top_logp) if x is not None),
            )

        completions = [cut(i, options) for i, options in enumerate(decoding)]
        return Rollout(
            with_versions(completions, partial, step) if partial else completions,
            tuple(int(n) for n in samples.decode_steps),
            tuple(int(n) for n in samples.refills),
        )

    def _stop_string(self, ids: np.ndarray, reason: StopReason, options: Decoding) -> str | None:
        if reason is not StopReason.STOP or not options.stop:
            return None
        return completed_by_last(options.stop, [self._token_bytes[t] for t in ids])

    def _teller(self, decoding: Sequence[Decoding], hear: Callable[[Sequence[Finished]], None]) -> Hear:
        """Tells `hear` what is new in what a part has come to."""
        known: set[int] = set()

        def tell(told: Told) -> None:
            new = [(i, ids, stop) for i, ids, stop in finished(told) if i not in known]
            known.update(i for i, *_ in new)
            hear([Finished(i, ids, self._stop_string(ids, stop, decoding[i])) for i, ids, stop in new])

        return tell


def check_stops_early(config: ModelConfig, mesh: Mesh) -> None:
    """Raises: ValueError where rollouts cannot be partial: what a replica catches up with is its own, and replicas that
    share experts must run the same steps."""
    if config.moe and mesh.shape["expert"] > 1:
        raise ValueError(
            f"mesh.expert={mesh.shape['expert']}: replicas that share experts cannot stop a rollout early: set "
            "mesh.expert=1, or rollout.partial=null"
        )
