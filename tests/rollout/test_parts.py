"""A rollout in several programs is that in one, bit for bit, and tells of each sample once, while others are drawn."""

import types

import jax
import numpy as np
import pytest
from tiny_engine import CONFIG, STOPS, mesh_of, model

from jaxrl_post.models.decoder import abstract
from jaxrl_post.rollout.parts import schedule
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.schedule import SampleOptions
from sharding.placement import place, tree_shardings
from sharding.rules import ROLLOUT

PROMPTS = [[3 + i] * (2 + i % 5) for i in range(8)]


def rollouts(devices, **keys):
    """The same in one program and in parts; what was told of the second."""
    axes = {"fsdp": max(devices // 2, 1), "tensor": min(devices, 2)}
    mesh = mesh_of(devices, **axes)
    _, shapes, names = abstract(CONFIG)
    params = place(model()[1], tree_shardings(names, shapes, ROLLOUT, mesh))
    sampler, told = Sampler(model()[0], CONFIG, mesh, STOPS), []
    options = SampleOptions(samples_per_prompt=4, max_new_tokens=40, **keys)
    draw = lambda **how: sampler.generate(params, PROMPTS, options, seed=5, step=2, **how)
    return draw(), draw(hear=told.append), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "keys"),
    [
        (1, {}),
        (1, {"slots": 8, "refill": 2, "prefill_columns": 4}),
        (8, {}),
        (8, {"slots": 4, "lockstep": True}),
    ],
)
def test_parts_are_the_whole(devices, keys):
    whole, parts, told = rollouts(devices, **keys)
    assert (parts.decode_steps, parts.refills) == (whole.decode_steps, whole.refills)
    for one, other in zip(whole.completions, parts.completions, strict=True):
        jax.tree.map(np.testing.assert_array_equal, vars(one), vars(other))
    requests = [one.request for news in told for one in news]
    assert len(told) > 2
    assert len(set(requests)) == len(requests)
    assert len(PROMPTS) * 4 // 2 <= len(requests) < len(PROMPTS) * 4
    for one in (one for news in told for one in news):
        np.testing.assert_array_equal(one.ids, whole.completions[one.request].ids)


@pytest.mark.parametrize(
    ("requests", "drain", "expected"),
    [
        (32, (32,), [(0, 24), (0, 16), (0, 8), (0, 4), (0, 0)]),
        (256, (256, 128, 64, 32), [(0, 192), (0, 0), (1, 0), (2, 0), (3, 0)]),
        (256, (64, 32), [(0, 192), (0, 128), (0, 64), (0, 0), (1, 0)]),  # slots refilled first
        (1, (1,), [(0, 0)]),
    ],
)
def test_what_is_left_when_a_part_ends(requests, drain, expected):
    """A phase leaves what the next one has slots for."""
    assert list(schedule(types.SimpleNamespace(drain=drain, phases=drain), requests)) == expected
