"""A rollout as several programs, so that the host sees what has finished while the rest is sampled.

Each program goes on where the one before it stopped, on the same cache: no slot waits, no prompt is prefilled twice.
The host asks for a program before it looks at what the last one has finished, so that a device is never without work;
replicas go from one to the next each at its own pace. Callbacks into the host from within one program would do too, but
JAX keeps no such program in its persistent cache, and refuses them beside mesh axes that are left to the compiler.

N requests, R response limit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Traced

from jaxrl_post.models.decoder import Params
from jaxrl_post.rollout.cache import Caches
from jaxrl_post.rollout.engine import WHOLE, Engine
from jaxrl_post.rollout.records import Requests, Samples
from jaxrl_post.rollout.replica import State
from jaxrl_post.rollout.schedule import EngineShape
from jaxrl_post.rollout.stop_strings import Automaton
from jaxrl_post.types import StopReason
from sharding.mesh import BATCH_AXES, batch_shards
from sharding.rules import ROLLOUT

SHARDED = PartitionSpec(BATCH_AXES)
LEFT = (0.75, 0.5, 0.25, 0.125)  # shares of the requests that are unfinished when the first phase hands over


class Told(NamedTuple):
    """What is sampled by the end of a part: tokens int32 [N, R], lengths and stops int32 [N], as in `Samples`."""

    tokens: Any
    lengths: Any
    stops: Any


Hear = Callable[[Told], None]  # given arrays on the devices


class Finished(NamedTuple):
    """A request that is done: its number, the sampled ids [n], and the stop string that the last one completed."""

    request: int
    ids: np.ndarray
    stop_string: str | None


def make_rollout_in_parts(
    graphdef: nnx.GraphDef, shape: EngineShape, mesh: Mesh, weight_specs: Any = WHOLE
) -> Callable[[Params, Requests, Automaton | None, jax.Array, Hear], Samples]:
    """`rollout(params, requests, automaton, step, hear) -> Samples`, otherwise as `engine.make_rollout`.

    `hear` is called after every part but the last. The draws, and with them the ids, are those of the one program.
    """
    start, *phases = make_programs(graphdef, shape, mesh, weight_specs)

    def rollout(
        params: Params, requests: Requests, automaton: Automaton | None, step: jax.Array, hear: Hear
    ) -> Samples:
        state, before = start(params, requests), None
        for phase, until in schedule(shape, len(requests.ids) // batch_shards(mesh)):
            cache, rest = state.cache, state._replace(cache=())
            state, told = phases[phase](params, requests, automaton, step, cache, rest, np.int32(until))
            if before is not None:
                hear(before)
            before = told
        return state.samples

    return rollout


def schedule(shape: EngineShape, requests: int) -> Iterator[tuple[int, int]]:
    """The parts of a replica's rollout: a phase, and how many requests end it early when so few are unfinished."""
    enough = (*shape.drain[1:], 0)[0]
    yield from ((0, left) for left in (int(share * requests) for share in LEFT) if enough < left)
    yield from ((phase, 0) for phase in range(len(shape.phases)))


def make_programs(
    graphdef: nnx.GraphDef, shape: EngineShape, mesh: Mesh, weight_specs: Any = WHOLE
) -> list[Callable[..., Any]]:
    """`start(params, requests) -> State`, and for every phase `advance(params, requests, automaton, step, cache, state
    without it, until) -> State, Told`.

    Arrays of a state, samples aside, have the replicas in front. A cache is given for good, unless it is to be packed
    into a smaller one.
    """
    on_replicas: Any = functools.partial(jax.shard_map, mesh=mesh, axis_names=set(BATCH_AXES), check_vma=False)
    engine = lambda params, *rest: Engine(nnx.merge(graphdef, params), shape, *rest)

    def begin(params: Params, requests: Requests) -> State:
        return _of_replica(lambda x: x[None], engine(params, requests, None, np.int32(0)).replica.start())

    def advance(
        phase: int,
        params: Params,
        requests: Requests,
        automaton: Automaton | None,
        step: jax.Array,
        cache: Caches,
        rest: State,
        until: jax.Array,
    ) -> tuple[State, Told]:
        state = _of_replica(lambda x: x[0], rest._replace(cache=cache))
        state = engine(params, requests, automaton, step, until).advance(phase, state)
        samples = state.samples
        return _of_replica(lambda x: x[None], state), Told(samples.tokens, samples.lengths, samples.stops)

    specs = (weight_specs, SHARDED, WHOLE, WHOLE, SHARDED, SHARDED, WHOLE)
    placed = _state_shardings(shape, mesh)
    started = on_replicas(begin, in_specs=specs[:2], out_specs=SHARDED)
    programs: list[Callable[..., Any]] = [jax.jit(started, out_shardings=placed)]
    for phase in range(len(shape.phases)):
        advanced = on_replicas(functools.partial(advance, phase), in_specs=specs, out_specs=SHARDED)
        donated = () if phase and shape.unrolled else (4,)
        programs.append(jax.jit(advanced, donate_argnums=donated, out_shardings=(placed, NamedSharding(mesh, SHARDED))))
    return programs


def trace_parts(
    graphdef: nnx.GraphDef,
    shape: EngineShape,
    mesh: Mesh,
    weight_specs: Any,
    params: Params,
    requests: Requests,
    step: jax.ShapeDtypeStruct,
) -> list[tuple[Caches, Traced]]:
    """The program of each phase from abstract arguments, and the cache that it is given; that which makes an empty one
    is left out."""
    programs: Any = make_programs(graphdef, shape, mesh, weight_specs)
    state, found = jax.eval_shape(programs[0], params, requests), []
    for phase in programs[1:]:
        state = State(*(_laid_out(*part) for part in zip(state, _state_shardings(shape, mesh), strict=True)))
        rest = state._replace(cache=())
        traced = phase.trace(params, requests, None, step, state.cache, rest, np.int32(0))
        found.append((state.cache, traced))
        state, _ = traced.out_info
    return found


def _laid_out(shapes: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def finished(told: Told) -> Iterator[tuple[int, np.ndarray, StopReason]]:
    """Number, ids [n] and reason of all requests on the devices of this process that are done."""
    tokens, lengths, stops = (_local(array) for array in told)
    for first, stops_N in stops.items():
        for i in np.flatnonzero(stops_N):
            yield first + int(i), tokens[first][i, : lengths[first][i]], StopReason(int(stops_N[i]))


def _of_replica(axis: Callable[[jax.Array], jax.Array], state: State) -> State:
    """With an axis for the replicas in front, or without; samples are a replica's own run of the requests."""
    *others, samples = state
    return State(*[*jax.tree.map(axis, others), samples])


def _state_shardings(shape: EngineShape, mesh: Mesh) -> State:
    """Of all arrays of a state's fields: the cache's heads are cut as the weights that make them."""
    before_heads = (None,) if shape.unrolled else (None, None)
    cut: Any = NamedSharding(mesh, PartitionSpec(BATCH_AXES, *before_heads, ROLLOUT.kv_heads))
    sharded: Any = NamedSharding(mesh, SHARDED)
    return State(**(dict.fromkeys(State._fields, sharded) | {"cache": cut}))


def _local(array: jax.Array) -> dict[int, np.ndarray]:
    """The parts of an array that this process holds, by the number of their first row."""
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return {first: np.asarray(data) for first, data in shards.items()}
