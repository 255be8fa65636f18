"""A tiny random decoder, trajectories, and one update on a mesh of fake devices."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax

from jaxrl_post.config import GRPO
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Decoder, abstract, split
from jaxrl_post.training.loss import policy_loss
from jaxrl_post.training.optimizer import Optimizer
from jaxrl_post.training.packing import PackShape, empty_batch, pack
from jaxrl_post.training.state import abstract_state, init_state, state_shardings
from jaxrl_post.training.update import batch_shardings, make_update
from jaxrl_post.types import Trajectory
from sharding import make_mesh

TINY = ModelConfig("qwen2", 32, 16, 32, layers=2, heads=4, kv_heads=2, head_dim=8, initializer_range=0.3)
TEMPERATURE = 0.7
# Without machine-code optimisation programs this small compile three times faster.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def sgd(rate: float) -> Optimizer:
    return Optimizer(optax.identity(), lambda _: jax.numpy.float32(rate), None)


def tiny_params(config: ModelConfig = TINY, seed: int = 0) -> tuple:
    """graphdef and host params; norms and biases are drawn at random too, so that none is neutral."""
    graphdef, params = split(Decoder(config, jax.random.key(seed)))
    rng = np.random.default_rng(seed)
    jitter = lambda p: np.asarray(p) + 0.1 * rng.standard_normal(p.shape).astype(np.float32)
    return graphdef, jax.tree.map(jitter, params)


def trajectories(
    seed: int = 0, groups: int = 3, samples: int = 4, max_prompt: int = 9, max_response: int = 12, vocab: int = 32
) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    out = []
    for group in range(groups):
        prompt = tuple(int(i) for i in rng.integers(0, vocab, rng.integers(1, max_prompt + 1)))
        for _ in range(samples):
            n = int(rng.integers(0, max_response + 1))
            response = rng.integers(0, vocab, n).astype(np.int32)
            logp = rng.normal(-3.5, 0.3, n).astype(np.float32)
            out.append(Trajectory(group, prompt, response, logp, float(rng.normal()), bool(rng.random() < 0.85)))
    return out


class Trainer:
    """The update of one mesh and pack shape on the tiny decoder, by SGD with rate 1 unless told otherwise."""

    def __init__(self, shape: PackShape, mesh: jax.sharding.Mesh | None = None):
        mesh = mesh or make_mesh({}, jax.devices()[:1])
        self.shape, self.optimizer = shape, sgd(1.0)
        self.graphdef, params, axes = abstract(TINY)
        self.shardings = state_shardings(params, axes, self.optimizer, mesh)
        self.batch_shardings = batch_shardings(shape, mesh)
        self.jitted = make_update(
            self.graphdef,
            self.optimizer,
            policy_loss(GRPO(), num_sequences=1),
            temperature=TEMPERATURE,
            chunk=16,
            shardings=self.shardings,
            batch_shardings=self.batch_shardings,
        )

    @functools.cached_property
    def program(self):
        state = abstract_state(abstract(TINY)[1], self.optimizer)
        return self.jitted.lower(state, empty_batch(self.shape), np.int32(0)).compile(FAST_COMPILE)

    def update_and_logp(self, state, batch, n_micro):
        return self.program(state, batch, np.int32(n_micro))

    def update(self, state, batch, n_micro):
        return self.update_and_logp(state, batch, n_micro)[:2]

    def state(self, params):
        return init_state(params, self.optimizer, self.shardings)

    def step(self, params, samples, **options):
        batch, n_micro, _ = pack(samples, self.shape, aggregation="token-mean", **options)
        state, metrics = self.update(self.state(params), batch, n_micro)
        return jax.device_get(state.params), jax.device_get(metrics)


def assert_trees_close(actual, expected, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), actual, expected)
