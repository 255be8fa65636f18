"""A rollout that the host drives, a few tokens at a time: prefill, insert, generate, extend, free.

The same decoder, cache functions and draws as the in-graph engine, so the same request samples the same ids. It costs a
host round trip every k tokens and can do what one XLA program cannot: stream, take requests at any time, and let a
finished sequence go on after appended text, on its own keys and values. The shape is JetStream's engine API.

A slot's tokens are those in the cache and the pending ones. The last pending token is never prefilled: the decode step
that feeds it draws the token after it, whether it ends a prompt, an answer or appended text.

S slots, W columns of a slot, k steps of a call, B columns of a piece, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Params
from jaxrl_post.rollout.cache import Cache
from jaxrl_post.rollout.decoding import MOST_LOGPROBS, Decoding, check, check_ids
from jaxrl_post.rollout.sampling import Features, Sampling
from jaxrl_post.rollout.schedule import PIECE
from jaxrl_post.rollout.step_cache import Caches
from jaxrl_post.rollout.step_inputs import inputs_of, options_of
from jaxrl_post.rollout.step_programs import Programs, Steps, Weights
from jaxrl_post.rollout.step_records import PLAIN, Burst, Prefix, Request, Slot
from jaxrl_post.rollout.step_widths import decode_columns, lengths_of_every_width, piece_size, prefix_columns
from jaxrl_post.rollout.stop_strings import bytes_of_all, completed_by_last
from jaxrl_post.types import StopReason
from sharding.mesh import batch_shards


class StepEngine:
    """Slots on the devices and what the host knows of them. Not for several threads at once."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: ModelConfig,
        mesh: Mesh,
        stop_ids: Collection[int],
        *,
        slots: int,
        columns: int,
        steps: int = 4,
        piece: int = PIECE,
        token_bytes: Sequence[bytes] = (),
    ):
        """
        Args:
          slots: sequences decoded at once, a multiple of the mesh's data replicas.
          columns: most tokens of a sequence.
          steps: tokens a call of `generate` samples in each slot.
          piece: most tokens that one call prefills; a power of two.
          token_bytes: of every id, to find stop strings by.

        Raises: ValueError for stop ids outside the vocabulary, slots that do not divide, and too many columns.
        """
        check_ids("stop ids", stop_ids, config.vocab_size)
        if slots % batch_shards(mesh):
            raise ValueError(f"slots={slots} must be a multiple of the mesh's {batch_shards(mesh)} data replicas")
        if columns > config.max_positions:
            raise ValueError(f"columns={columns} exceeds the model's {config.max_positions} positions")
        self.config, self.columns = config, columns
        self.slots = [Slot() for _ in range(slots)]
        self._stop_ids, self.piece = frozenset(stop_ids), piece
        self._token_bytes = bytes_of_all(token_bytes, config.vocab_size)
        self.steps = steps
        self._programs = Programs(graphdef, config, mesh, slots, columns, steps)
        self._cache = self._programs.empty(slots, columns)
        self._decoding: list[Decoding] = []

    def load(self, params: Params) -> Weights:
        """`params` in the rollout layout, made ready. On a CPU layers are copied out of their stacks, once here, and
        the answer does not hold the stacks: they are freed with the caller's `params`."""
        return self._programs.load(params)

    # A sequence from its prompt.

    def begin(self, ids: Sequence[int]) -> Prefix:
        """A prefix of which nothing is computed yet. Raises: ValueError for no ids, or more than fit a slot."""
        self._check_prompt(ids)
        return Prefix(tuple(ids), 0, self._programs.empty(1, prefix_columns(len(ids), self.columns)))

    def advance(self, weights: Weights, prefix: Prefix) -> Prefix:
        """One more piece of it; the prefix handed in must not be used again."""
        width = _width(prefix.cache)
        piece, count = self._next_piece(prefix.ids[prefix.length : -1], width - prefix.length)
        cache = self._programs.prefill(weights, prefix.cache, np.int32(prefix.length), piece)
        return Prefix(prefix.ids, prefix.length + count, cache)

    def prefill(self, weights: Weights, ids: Sequence[int]) -> Prefix:
        """A prompt's keys and values, without the last token's."""
        prefix = self.begin(ids)
        while not prefix.ready:
            prefix = self.advance(weights, prefix)
        return prefix

    def insert(self, prefix: Prefix, slot: int, request: Request) -> None:
        """Let a request run in a free slot. Raises: ValueError when prompt and limit do not fit."""
        self._check_free(slot)
        if not prefix.ready:
            raise ValueError(f"{prefix.length} of the prefix's {len(prefix.ids)} tokens are computed: advance it first")
        self._check(request, len(prefix.ids))
        self._cache = self._programs.insert(self._cache, prefix.cache, np.int32(slot))
        self.slots[slot] = Slot(request, [prefix.ids[-1]], prefix.length, list(prefix.ids))

    def start(self, slot: int, ids: Sequence[int], request: Request) -> None:
        """Let a request run in a free slot after a prompt that is not computed yet; `feed` the slot until it runs.

        Raises: as `begin` and `insert`.
        """
        self.check(ids, request)
        self._check_free(slot)
        self.slots[slot] = Slot(request, list(ids), prompt=list(ids))

    # A sequence that goes on.

    def extend(self, slot: int, ids: Sequence[int], request: Request) -> None:
        """Go on after what a slot has sampled and `ids`, as a new request; `feed` the slot until it runs.

        Raises: ValueError when the sequence and the limit do not fit, or the slot is free.
        """
        old = self.slots[slot]
        if not old.pending:
            raise ValueError(f"slot {slot} is free: nothing to extend")
        pending = [*old.pending, *ids]
        self._check(request, old.length + len(pending))
        self.slots[slot] = Slot(request, pending, old.length, [*old.prompt, *old.sampled, *ids])

    def feed(self, weights: Weights, slot: int) -> bool:
        """Prefill one piece of a slot's pending tokens; whether the slot runs now."""
        at = self.slots[slot]
        if len(at.pending) > 1:
            piece, count = self._next_piece(at.pending[:-1], self.columns - at.length)
            self._cache = self._programs.extend(weights, self._cache, np.int32(slot), np.int32(at.length), piece)
            del at.pending[:count]
            at.length += count
        return at.running

    def pause(self, slot: int) -> None:
        """End a slot's request and keep the sequence, to be extended or freed."""
        self.slots[slot].request = None

    def free(self, slot: int) -> None:
        """Give the slot up, whatever it was doing."""
        self.slots[slot] = Slot()

    # All slots.

    def generate(self, weights: Weights) -> dict[int, Burst]:
        """Up to k tokens of every running slot. A slot whose request ended keeps its sequence until it is freed.

        Raises: ValueError for log-probs that are not finite.
        """
        running = [i for i, slot in enumerate(self.slots) if slot.running]
        if not running:
            return {}
        decoding = [slot.request.decoding if slot.request is not None else PLAIN for slot in self.slots]
        options, features = self._sampling(decoding)
        longest = max(self.slots[i].length for i in running)
        columns = decode_columns(longest, self.steps, self.columns)
        top = min(MOST_LOGPROBS, self.config.vocab_size) if any(d.top_logprobs for d in decoding) else 0
        program = self._programs.decode(features, columns, top)
        self._cache, steps = program(weights, self._cache, inputs_of(self.slots, self.columns, options, features))
        steps = jax.device_get(steps)
        if not np.isfinite(steps.raw_logp[steps.live]).all():
            raise ValueError("the model's log-probs are not finite: its weights are not, or training diverged")
        return {i: self._record(i, steps) for i in running}

    def _sampling(self, decoding: list[Decoding]) -> tuple[Sampling, Features]:
        """The slots' options as arrays, made anew when they change."""
        if decoding != self._decoding:
            self._decoding, self._arrays = decoding, options_of(decoding, self._stop_ids)
        return self._arrays

    def _record(self, i: int, steps: Steps) -> Burst:
        slot = self.slots[i]
        assert slot.request is not None
        decoding, ids = slot.request.decoding, steps.token[steps.live[:, i], i]
        string, n = self._stop_string(slot, decoding, ids.tolist()) if decoding.stop else (None, len(ids))
        reason = StopReason.STOP if string is not None else steps.stop[n - 1, i]
        stop = StopReason(int(reason)) if reason else None
        top_ids, top_logp = (x[:n, i, : decoding.top_logprobs] for x in (steps.top_ids, steps.top_logp))
        burst = Burst(ids[:n], steps.logp[:n, i], steps.raw_logp[:n, i], top_ids, top_logp, stop, string)
        # What was sampled after a stop string is in the cache, but beyond the length: it is written over.
        slot.pending, slot.length = [int(ids[n - 1])], slot.length + n
        slot.sampled += ids[:n].tolist()
        if stop is not None:
            slot.request = None
        return burst

    def _stop_string(self, slot: Slot, decoding: Decoding, ids: Sequence[int]) -> tuple[str | None, int]:
        """The first stop string that one of these tokens completes, and the tokens up to that one."""
        longest = max(len(string.encode()) for string in decoding.stop)
        for n, token in enumerate(ids, start=1):
            spelt = self._token_bytes[token]
            string = completed_by_last(decoding.stop, [slot.tail, spelt])
            if string is not None and len(slot.sampled) + n > decoding.min_tokens:
                return string, n
            slot.tail = (slot.tail + spelt)[-longest:]
        return None, len(ids)

    def _next_piece(self, ids: Sequence[int], room: int) -> tuple[np.ndarray, int]:
        """The next tokens padded to a power of two, int32 [1, B], and how many they are. B never exceeds the room."""
        size = piece_size(len(ids), room, self.piece)
        piece = np.zeros((1, size), np.int32)
        count = min(size, len(ids))
        piece[0, :count] = ids[:count]
        return piece, count

    def compile_all(self, weights: Weights, decoding: Decoding) -> Iterator[int]:
        """Run a prompt of every width there is, decoded like that, and yield its length when it is done; all slots must
        be free. Afterwards no such request compiles anything; other options may compile decode steps of their own."""
        for tokens in lengths_of_every_width(self.columns, self.piece, self.steps):
            self.insert(self.prefill(weights, [0] * tokens), 0, Request(1, decoding))
            self.generate(weights)
            self.free(0)
            yield tokens

    def check(self, ids: Sequence[int], request: Request) -> None:
        """Raises: ValueError for a prompt and a request that no slot can hold. Safe on any thread."""
        self._check_prompt(ids)
        self._check(request, len(ids))

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError("the prompt has no tokens, and the tokenizer adds none at its start")
        if len(ids) >= self.columns:
            raise ValueError(f"the prompt has {len(ids)} tokens and leaves no room in a slot of {self.columns}")

    def _check_free(self, slot: int) -> None:
        if self.slots[slot].request is not None:
            raise ValueError(f"slot {slot} is taken: free it first")

    def _check(self, request: Request, length: int) -> None:
        if request.limit < 1:
            raise ValueError(f"limit={request.limit}: a request samples at least one token")
        check(request.decoding, self.config.vocab_size)
        if request.decoding.stop and not self._token_bytes:
            raise ValueError(f"stop={list(request.decoding.stop)} needs the bytes of tokens: make the engine with them")
        if length + request.limit > self.columns:
            raise ValueError(
                f"{length} tokens and {request.limit} new ones exceed the {self.columns} columns of a slot"
            )


def _width(cache: Caches) -> int:
    one = cache if isinstance(cache, Cache) else cache[0]
    return one.prompts.k.shape[-1]
