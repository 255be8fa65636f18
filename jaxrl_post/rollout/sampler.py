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
from jaxrl_post.rollout.decoding import Decoding, check, check_ids, sampling_arrays
from jaxrl_post.rollout.engine import make_rollout
from jaxrl_post.rollout.partial import Partial, with_versions
from jaxrl_post.rollout.parts import Finished, Hear, Told, finished, make_rollout_in_parts
from jaxrl_post.rollout.records import Requests, Samples, started
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
        strings = self._checked_strings(each or [options])
        decoding = each or [options] * (len(prompts) * options.samples_per_prompt)
        tops = [d.top_logprobs for d in decoding]
        options = dataclasses.replace(options, top_logprobs=max(tops))
        requests = self._requests(prompts, options, width, seed, limits, seeds, each)
        replicas = batch_shards(self._mesh)
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
            rollout = _with_choices(rollout, samples, lengths)
        if not all(np.isfinite([c.logp, c.raw_logp]).all() for c in rollout.completions):
            raise ValueError(
                f"the model's log-probs at step {step} are not finite: its weights are not, or training diverged; "
                "check the model's files, or go on from an earlier checkpoint with a lower optimizer.learning_rate"
            )
        return rollout

    def traced(self, params: Params, prompts: int, options: SampleOptions, width: int) -> tuple[EngineShape, Traced]:
        """The program of `generate` for so many full prompts and all samples in full, from abstract parameters in the
        rollout layout; nothing is allocated on a device."""
        self._checked_strings([options])
        requests = self._requests([[0] * width] * prompts, options, width, 0, None, None)
        shape = self._shape(requests, options, width, None)
        sharded, whole = self._layouts()
        abstract_requests = placed_shapes(requests, jax.tree.map(lambda _: sharded, requests))
        step = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
        program: Any = make_rollout(self._graphdef, shape, self._mesh, self._specs)
        return shape, program.trace(params, abstract_requests, None, step)

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

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        options: SampleOptions,
        width: int,
        seed: int,
        limits: Sequence[int] | None,
        seeds: Sequence[int] | None,
        each: Sequence[Decoding] | None = None,
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
        decoding = [*(each or [options] * (P * G)), *([Decoding()] * ((padded - P) * G))]
        if len(decoding) != padded * G:
            raise ValueError(f"each has {len(each or ())} options for {P * G} requests")
        sampling = sampling_arrays(decoding, self._stop_ids, _strings(decoding))
        return Requests(tokens, lengths, np.arange(padded * G, dtype=np.int32), all_seeds, all_limits, sampling)

    def _checked_strings(self, decoding: Sequence[Decoding]) -> tuple[str, ...]:
        """The stop strings of all requests; their automaton is made when they are new."""
        for options in set(decoding):
            check(options, self._config.vocab_size)
        strings = _strings(decoding)
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


def _with_choices(rollout: Rollout, samples: Samples, length_P: np.ndarray) -> Rollout:
    """Each completion with the experts of its prompt's tokens and of its own but the last."""

    def routed(i: int, c: Completion) -> Completion:
        prompt = samples.prompt_choices[c.prompt, : length_P[c.prompt]]
        return dataclasses.replace(c, choices=np.concatenate([prompt, samples.choices[i, : max(len(c.ids) - 1, 0)]]))

    return dataclasses.replace(rollout, completions=[routed(i, c) for i, c in enumerate(rollout.completions)])


def _strings(decoding: Sequence[Decoding]) -> tuple[str, ...]:
    return tuple(sorted({string for options in set(decoding) for string in options.stop}))
