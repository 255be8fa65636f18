"""The programs of a recipe's rollout, to be compiled for a plan: which there are, and how often their loops run."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax.numpy as jnp
from jax.stages import Traced

from jaxrl_post.config import Config
from jaxrl_post.config_rewards import ForeignCode, single_rewards
from jaxrl_post.loops.gather import sample_options
from jaxrl_post.loops.job import Job, grades_early
from jaxrl_post.loops.planned import Planned, sent_share
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.schedule import EngineShape
from sharding.memory import placed_bytes
from sharding.mesh import batch_shards
from sharding.targets import Target

ROLLOUT_WEIGHTS = "weights in the rollout's layout"


def planned_rollout(
    job: Job, target: Target, held: dict[str, int], on_host: dict[str, int]
) -> tuple[list[Planned], EngineShape]:
    """One program, or one for each phase where graders hear early of what has finished.

    Phases after the first have nothing to do where every sample runs to its limit, and take room. `held` and `on_host`
    lie beside all of them.
    """
    config, network = job.config, job.network
    sampler = Sampler(network.graphdef, network.model, network.mesh, job.stop_ids, device_memory=target.chip.memory)
    params, prompts = network.rollout_shapes(), config.data.prompts_per_step
    options = dataclasses.replace(sample_options(config, job.tokenizer), stop=())  # a table of a few kilobytes

    def program(name: str, traced: Traced, cache: int, inside: str, trips: list[int]) -> Planned:
        made = {ROLLOUT_WEIGHTS: placed_bytes(params), "cache": cache}
        read = _traffic(job, shape) if any(trips) else 0.0
        return Planned(name, 1, traced, held, made, inside, trips, read, on_host, filled=sent_share(network))

    if not is_early(config, target):
        shape, traced = sampler.traced(params, prompts, options, job.prompt_width)
        return [program("rollout", traced, _cache_bytes(job, shape)[0], "cache", _trips(job, shape))], shape
    shape, parts = sampler.traced_parts(params, prompts, options, job.prompt_width)
    drained = [len(tiers) for _, tiers in shape.phases[1:]]
    trips = _trips(job, shape)
    counts, left = [len(trips) - sum(drained), *drained], iter(trips)  # of loops; the first phase fills, too
    return [
        program(f"rollout, {slots} slots", traced, placed_bytes(cache), "", list(itertools.islice(left, count)))
        for (slots, _), (cache, traced), count in zip(shape.phases, parts, counts, strict=True)
    ], shape


def is_early(config: Config, target: Target) -> bool:
    """Whether a run on the target would grade samples while others are sampled."""
    auto = grades_early(config, target.chip.platform)
    singles = single_rewards(config.reward).values()
    return any(isinstance(one, ForeignCode) and one.grades_early(auto) for one in singles)


def rollout_trips(shape: EngineShape, prompts: int) -> list[int]:
    """How often each loop of a rollout runs when every sample runs to its limit: the filling, the decoding inside of it
    where requests wait for slots, and the tiers of each phase."""
    requests = prompts * shape.group
    fills = math.ceil(requests / shape.refill) * shape.pieces
    ends = [0, *shape.phases[0][1]]
    drained = [0 for _, tiers in shape.phases[1:] for _ in tiers]
    last = [after - before for before, after in itertools.pairwise(ends)]
    if shape.slots == requests:
        return [fills, *last, *drained]
    waves = math.ceil(requests / shape.slots)
    return [fills, math.ceil((waves - 1) * shape.max_new / fills), *last, *drained]


def _trips(job: Job, shape: EngineShape) -> list[int]:
    return rollout_trips(shape, math.ceil(job.config.data.prompts_per_step / batch_shards(job.network.mesh)))


def _traffic(job: Job, shape: EngineShape) -> float:
    """Bytes read by all decode steps, of weights and of the cache."""
    trips, weights = _trips(job, shape), placed_bytes(job.network.rollout_shapes())
    return sum(trips[1:]) * weights + _cache_traffic(shape, trips, _cache_bytes(job, shape))


def _cache_bytes(job: Job, shape: EngineShape) -> tuple[int, int]:
    """Of prompts and responses together, and of responses alone, on a device."""
    model, tensor = job.network.model, job.network.mesh.shape["tensor"]
    column = 2 * model.layers * model.kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize // tensor
    responses = column * shape.slots * shape.max_new
    return column * shape.prompt_rows * shape.pieces * shape.piece + responses, responses


def _cache_traffic(shape: EngineShape, trips: list[int], cache: tuple[int, int]) -> float:
    """Bytes read of the cache by all decode steps: prompts whole, responses up to the end of the tier, or by a kernel
    those there are, half of them on average."""
    ends = shape.phases[0][1]
    inner = len(trips) - 1 - sum(len(tiers) for _, tiers in shape.phases)
    steps = [*([trips[0] * trips[1]] if inner else []), *trips[1 + inner :]]
    reads = [*([shape.max_new] if inner else []), *ends]
    share = 1.0 if shape.attention == "xla" else 0.5
    whole = cache[1] * share / shape.max_new
    return sum(n * (cache[0] - cache[1] + whole * end) for n, end in zip(steps, reads, strict=False))
