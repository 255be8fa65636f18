"""One tiny decoder in both engines, shared by the tests."""

import functools

import jax

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Decoder, abstract, split
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.stepper import StepEngine
from sharding.mesh import make_mesh, resolve_sizes
from sharding.placement import place, tree_shardings
from sharding.rules import ROLLOUT

CONFIG = ModelConfig("qwen3", 98, 32, 64, 3, 4, 2, 16, initializer_range=0.3)
STOPS = (7, *range(84, 98))  # many: turns and requests end for both reasons
TOKEN_BYTES = [bytes([ord("a") + i % 26]) for i in range(98)]


def mesh_of(devices=1, **axes):
    return make_mesh(resolve_sizes({"fsdp": 1} | axes, devices), jax.devices()[:devices])


@functools.cache
def model():
    return split(Decoder(CONFIG, jax.random.key(0)))


@functools.cache
def sampler():
    return Sampler(model()[0], CONFIG, mesh_of(), STOPS, TOKEN_BYTES)


@functools.cache
def engine(devices=1, axes=()):
    """Of two slots, or one a device, pieces of 8 tokens, 3 steps a call; and its weights."""
    mesh = mesh_of(devices, **dict(axes))
    made = StepEngine(
        model()[0], CONFIG, mesh, STOPS, slots=max(2, devices), columns=48, steps=3, piece=8, token_bytes=TOKEN_BYTES
    )
    _, shapes, names = abstract(CONFIG)
    return made, made.load(place(model()[1], tree_shardings(names, shapes, ROLLOUT, mesh)))
