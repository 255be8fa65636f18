"""A rollout that the host drives, a few tokens at a time: prefill, insert, generate, extend, free.

The same decoder, cache functions and draws as the in-graph engine, so the same request samples the same ids. It costs a
host round trip every k tokens and can do what one XLA program cannot: stream, take requests at any time, and let a
finished sequence go on after appended text, on its own keys and values. The shape is JetStream's engine API.

A slot's tokens are those in the cache and the pending ones. The last pending token is never prefilled: the decode step
that feeds it draws the token after it, whether it ends a prompt, an answer or appended text.

S slots, W columns of a slot, k steps of a call, B columns of a piece, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Layer, Params
from jaxrl_post.rollout import cache as caches
from jaxrl_post.rollout.sampling import Features, Sampling, draw, uniforms
from jaxrl_post.rollout.schedule import PIECE
from jaxrl_post.rollout.step_cache import Caches, attend_rows, copy_row, empty_rows
from jaxrl_post.types import StopReason
from sharding.mesh import BATCH_AXES, batch_shards
from sharding.rules import ROLLOUT, partition_spec

SHORTEST_PIECE = 8
FEWEST_COLUMNS = 64


@dataclasses.dataclass(frozen=True)
class Request:
    """What a sequence asks for: at most `limit` new tokens. (seed, step, id, position) key its draws."""

    limit: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    id: int = 0
    seed: int = 0
    step: int = 0


@dataclasses.dataclass
class Slot:
    """`length` tokens are in the cache, `pending` ones are not; `sampled` ones are of this request."""

    request: Request | None = None
    pending: list[int] = dataclasses.field(default_factory=list)
    length: int = 0
    sampled: int = 0

    @property
    def running(self) -> bool:
        """Takes part in decode steps: all but its last token have been fed."""
        return self.request is not None and len(self.pending) == 1


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prompt, of which `length` tokens are in a cache of one row. It may be inserted into any number of slots."""

    ids: tuple[int, ...]
    length: int
    cache: Caches

    @property
    def ready(self) -> bool:
        return self.length == len(self.ids) - 1


@dataclasses.dataclass(frozen=True)
class Burst:
    """What one slot sampled in one call: ids int32 [n], logp and raw_logp float32 [n] (as `types.Completion`), the
    likeliest tokens top_ids int32 [n, top] and their raw log-probabilities top_logp float32 [n, top]; `stop` None for a
    sequence that goes on.
    """

    ids: np.ndarray
    logp: np.ndarray
    raw_logp: np.ndarray
    top_ids: np.ndarray
    top_logp: np.ndarray
    stop: StopReason | None


class Weights(NamedTuple):
    """Parameters in the rollout layout and the layers as the decode steps read them."""

    params: Params
    layers: Layer | tuple[Layer, ...]


class Inputs(NamedTuple):
    """What the host knows of its slots, [S] each: the pending token, tokens in the cache and sampled, the limit, …"""

    token: Any
    length: Any
    sampled: Any
    limit: Any
    running: Any
    id: Any
    seed: Any
    step: Any
    options: Sampling


class Steps(NamedTuple):
    """Of k steps, [k, S] each and the likeliest tokens [k, S, top]; `live` False where a slot had ended."""

    token: Any
    logp: Any
    raw_logp: Any
    stop: Any
    live: Any
    top_ids: Any
    top_logp: Any


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
        top: int = 0,
    ):
        """
        Args:
          slots: sequences decoded at once, a multiple of the mesh's data replicas.
          columns: most tokens of a sequence.
          steps: tokens a call of `generate` samples in each slot.
          piece: most tokens that one call prefills; a power of two.
          top: likeliest tokens to report with each sampled one.

        Raises: ValueError for stop ids outside the vocabulary, slots that do not divide, and too many columns.
        """
        if outside := sorted(i for i in stop_ids if not 0 <= i < config.vocab_size):
            raise ValueError(f"stop ids {outside} are outside the vocabulary of {config.vocab_size}")
        if slots % batch_shards(mesh):
            raise ValueError(f"slots={slots} must be a multiple of the mesh's {batch_shards(mesh)} data replicas")
        if columns > config.max_positions:
            raise ValueError(f"columns={columns} exceeds the model's {config.max_positions} positions")
        self.config, self.columns, self.top, self.stop_ids = config, columns, min(top, config.vocab_size), stop_ids
        self.slots = [Slot() for _ in range(slots)]
        self._piece = piece
        self._programs = Programs(graphdef, config, mesh, slots, columns, steps, self.top)
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._cache = self._programs.empty(slots, columns)

    def load(self, params: Params) -> Weights:
        """`params` in the rollout layout, made ready. On a CPU layers are copied out of their stacks, once here."""
        return self._programs.load(params)

    # A sequence from its prompt.

    def begin(self, ids: Sequence[int]) -> Prefix:
        """A prefix of which nothing is computed yet. Raises: ValueError for no ids, or more than fit a slot."""
        self._check_prompt(ids)
        return Prefix(tuple(ids), 0, self._programs.empty(1, min(_bucket(len(ids) - 1), self.columns)))

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
        self.slots[slot] = Slot(request, [prefix.ids[-1]], prefix.length)

    def start(self, slot: int, ids: Sequence[int], request: Request) -> None:
        """Let a request run in a free slot after a prompt that is not computed yet; `feed` the slot until it runs.

        Raises: as `begin` and `insert`.
        """
        self.check(ids, request)
        self._check_free(slot)
        self.slots[slot] = Slot(request, list(ids))

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
        self.slots[slot] = Slot(request, pending, old.length)

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
        inputs = self._inputs()
        features = dataclasses.replace(Features.of(inputs.options), greedy=True, tempered=True)
        longest = max(self.slots[i].length for i in running)
        columns = min(max(FEWEST_COLUMNS, _bucket(longest + self._programs.steps)), self.columns)
        self._cache, steps = self._programs.decode(features, columns)(weights, self._cache, inputs, self._stop_ids)
        steps = jax.device_get(steps)
        if not np.isfinite(steps.raw_logp[steps.live]).all():
            raise ValueError("the model's log-probs are not finite: its weights are not, or training diverged")
        return {i: self._record(i, steps) for i in running}

    def _record(self, i: int, steps: Steps) -> Burst:
        slot, n = self.slots[i], int(steps.live[:, i].sum())
        stop = StopReason(int(steps.stop[n - 1, i])) if steps.stop[n - 1, i] else None
        token, logp, raw_logp, top_ids, top_logp = (
            x[:n, i] for x in (steps.token, steps.logp, steps.raw_logp, steps.top_ids, steps.top_logp)
        )
        burst = Burst(token, logp, raw_logp, top_ids, top_logp, stop)
        slot.pending, slot.length, slot.sampled = [int(burst.ids[-1])], slot.length + n, slot.sampled + n
        if burst.stop is not None:
            slot.request = None
        return burst

    def _inputs(self) -> Inputs:
        slots, nothing = self.slots, Request(limit=0)
        requests = [slot.request or nothing for slot in slots]
        ints = lambda values: np.array(list(values), np.int32)
        return Inputs(
            token=ints(slot.pending[0] if slot.running else 0 for slot in slots),
            length=ints(slot.length for slot in slots),
            sampled=ints(slot.sampled for slot in slots),
            limit=ints(r.limit for r in requests),
            running=np.array([slot.running for slot in slots]),
            id=ints(r.id for r in requests),
            seed=np.array([r.seed for r in requests], np.uint32),
            step=ints(r.step for r in requests),
            options=Sampling(
                temperature=np.array([r.temperature for r in requests], np.float32),
                top_k=ints(r.top_k for r in requests),
                top_p=np.array([r.top_p for r in requests], np.float32),
            ),
        )

    def _next_piece(self, ids: Sequence[int], room: int) -> tuple[np.ndarray, int]:
        """The next tokens padded to a power of two, int32 [1, B], and how many they are. B never exceeds the room."""
        size = min(_bucket(len(ids)), self._piece)
        if size > room:
            size = 1 << (min(len(ids), room).bit_length() - 1)
        piece = np.zeros((1, size), np.int32)
        count = min(size, len(ids))
        piece[0, :count] = ids[:count]
        return piece, count

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
        if length + request.limit > self.columns:
            raise ValueError(
                f"{length} tokens and {request.limit} new ones exceed the {self.columns} columns of a slot"
            )


class Programs:
    """Compiled programs. Each data replica works on its own slots; weights and prefixes are whole on each."""

    def __init__(
        self, graphdef: nnx.GraphDef, config: ModelConfig, mesh: Mesh, slots: int, columns: int, steps: int, top: int
    ):
        self.steps = steps
        self._graphdef, self._config, self._mesh, self._top = graphdef, config, mesh, top
        self._unrolled = jax.default_backend() == "cpu"
        self._slots_each = slots // batch_shards(mesh)
        cache = jax.eval_shape(lambda: empty_rows(config, self._unrolled, slots, columns))
        outer = () if self._unrolled else ("layers",)
        shardings = lambda rows: jax.tree.map(
            lambda x: NamedSharding(
                mesh, partition_spec((*outer, rows, "kv_heads", None, None), x.shape, ROLLOUT, mesh, "cache")
            ),
            cache,
        )
        self._slot_shardings, self._prefix_shardings = shardings("batch"), shardings(None)
        self._slot_axis = PartitionSpec(*(None for _ in outer), BATCH_AXES)
        whole, by_slot = PartitionSpec(), PartitionSpec(BATCH_AXES)
        self.prefill = self._program(
            self._prefill, (whole, whole, whole, whole), whole, self._prefix_shardings, donated=1
        )
        self.extend = self._program(
            self._extend,
            (whole, self._slot_axis, whole, whole, whole),
            self._slot_axis,
            self._slot_shardings,
            donated=1,
        )
        self.insert = self._program(
            self._insert, (self._slot_axis, whole, whole), self._slot_axis, self._slot_shardings, donated=0
        )
        self._whole, self._by_slot = whole, by_slot
        self._decodes: dict[tuple[Features, int], Callable[..., tuple[Caches, Steps]]] = {}
        self._empties: dict[tuple[int, int], Callable[[], Caches]] = {}

    def load(self, params: Params) -> Weights:
        decoder = nnx.merge(self._graphdef, params)
        return Weights(params, decoder.unrolled() if self._unrolled else decoder.stacked())

    def empty(self, rows: int, columns: int) -> Caches:
        """Of all slots, or a prefix of one row."""
        if (rows, columns) not in self._empties:
            shardings = self._prefix_shardings if rows == 1 else self._slot_shardings
            make = functools.partial(empty_rows, self._config, self._unrolled, rows, columns)
            self._empties[rows, columns] = jax.jit(make, out_shardings=shardings)
        return self._empties[rows, columns]()

    def decode(self, features: Features, columns: int) -> Callable[..., tuple[Caches, Steps]]:
        """(weights, cache, inputs, stop ids) to the cache and `Steps`, compiled once for what is asked."""
        if (features, columns) not in self._decodes:
            self._decodes[features, columns] = self._program(
                functools.partial(self._decode, features, columns),
                (self._whole, self._slot_axis, self._by_slot, self._whole),
                (self._slot_axis, PartitionSpec(None, BATCH_AXES)),
                (self._slot_shardings, None),
                donated=1,
            )
        return self._decodes[features, columns]

    def _program(self, run: Callable, in_specs: Any, out_specs: Any, out_shardings: Any, donated: int) -> Callable:
        mapped = jax.shard_map(
            run, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(BATCH_AXES), check_vma=False
        )
        return jax.jit(mapped, out_shardings=out_shardings, donate_argnums=donated)

    # What each replica runs.

    def _prefill(self, weights: Weights, cache: Caches, start: jax.Array, token_1B: jax.Array) -> Caches:
        return self._piece(weights, cache, jnp.zeros(1, jnp.int32), start, token_1B)

    def _extend(
        self, weights: Weights, cache: Caches, slot: jax.Array, start: jax.Array, token_1B: jax.Array
    ) -> Caches:
        row, mine = self._local(slot)
        return self._piece(weights, cache, jnp.where(mine, row, self._slots_each)[None], start, token_1B)

    def _insert(self, cache: Caches, prefix: Caches, slot: jax.Array) -> Caches:
        return copy_row(cache, prefix, *self._local(slot))

    def _local(self, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The slot's row on its replica, and whether that is this one."""
        row = slot - lax.axis_index(BATCH_AXES) * self._slots_each
        return jnp.clip(row, 0, self._slots_each - 1), (row >= 0) & (row < self._slots_each)

    def _piece(
        self, weights: Weights, cache: Caches, row_1: jax.Array, start: jax.Array, token_1B: jax.Array
    ) -> Caches:
        decoder = nnx.merge(self._graphdef, weights.params)
        position_1B = start + jnp.arange(token_1B.shape[1])[None]
        attention = functools.partial(caches.attend_prompt, start, row_1)
        return decoder.through(weights.layers, token_1B, position_1B, cache, attention)[1]

    def _decode(
        self, features: Features, columns: int, weights: Weights, cache: Caches, inputs: Inputs, stop_ids: jax.Array
    ) -> tuple[Caches, Steps]:
        decoder = nnx.merge(self._graphdef, weights.params)

        def step(carry: tuple[Caches, Inputs], _: None) -> tuple[tuple[Caches, Inputs], Steps]:
            cache, at = carry
            attention = functools.partial(attend_rows, at.length, at.running, columns)
            x_S1D, cache = decoder.through(weights.layers, at.token[:, None], at.length[:, None], cache, attention)
            logits_SV = decoder.logits(x_S1D[:, 0])
            drawn = draw(logits_SV, at.options, _uniforms(at), features)
            stopped_S = (drawn.token[:, None] == stop_ids[None]).any(axis=-1)
            full_S = at.sampled + 1 >= at.limit
            stop_S = jnp.where(stopped_S, StopReason.STOP, jnp.where(full_S, StopReason.LENGTH, 0)).astype(jnp.int32)
            after = at._replace(
                token=jnp.where(at.running, drawn.token, at.token),
                length=at.length + at.running,
                sampled=at.sampled + at.running,
                running=at.running & (stop_S == 0),
            )
            top = _likeliest(logits_SV, self._top)
            return (cache, after), Steps(drawn.token, drawn.logp, drawn.raw_logp, stop_S, at.running, *top)

        (cache, _), steps = lax.scan(step, (cache, inputs), None, length=self.steps)
        return cache, steps


def _uniforms(at: Inputs) -> jax.Array:
    """As in the in-graph engine, of which all requests have one step."""
    one = lambda seed, step, request, position: uniforms(seed[None], step, request[None], position[None])[0]
    return jax.vmap(one)(at.seed, at.step, at.id, at.sampled)


def _likeliest(logits_SV: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
    """The `top` likeliest tokens, int32 [S, top], and their log-probabilities under softmax(logits)."""
    if top == 0:
        S = logits_SV.shape[0]
        return jnp.zeros((S, 0), jnp.int32), jnp.zeros((S, 0), jnp.float32)
    value_SX, token_SX = lax.top_k(logits_SV, top)
    return token_SX, value_SX - jax.nn.logsumexp(logits_SV, axis=-1, keepdims=True)


def _bucket(count: int) -> int:
    """The next power of two, at least SHORTEST_PIECE."""
    return max(SHORTEST_PIECE, 1 << max(count - 1, 0).bit_length())


def _width(cache: Caches) -> int:
    one = cache if isinstance(cache, caches.Cache) else cache[0]
    return one.prompts.k.shape[-1]
