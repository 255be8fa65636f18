"""Examples of drawn tokens, a tiny random decoder, and offline updates on meshes of fake devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Decoder, abstract, split
from jaxrl_post.training.offline_packing import example_shape, example_shardings, example_weights, pack_examples
from jaxrl_post.training.offline_update import language_model, make_forward, make_offline_update
from jaxrl_post.training.optimizer import Optimizer
from jaxrl_post.training.preference_loss import offline_loss
from jaxrl_post.training.state import init_state, state_shardings
from jaxrl_post.types_offline import Answer, Example
from sharding.mesh import make_mesh
from sharding.placement import place

TINY = ModelConfig("qwen2", 32, 16, 32, layers=2, heads=4, kv_heads=2, head_dim=8, initializer_range=0.3)
WIDTH = 96


def answer(ids, trained=None):
    return Answer(tuple(map(int, ids)), tuple(trained or [True] * len(ids)))


def draw(lengths, seed=0, prompts=(4, 7, 5, 6), **fields):
    """One example for each tuple of answer lengths."""
    rng = np.random.default_rng(seed)
    ids = lambda n: tuple(map(int, rng.integers(0, 32, n)))
    return [
        Example(ids(prompts[i % len(prompts)]), tuple(answer(ids(n)) for n in answers), **fields)
        for i, answers in enumerate(lengths)
    ]


def tiny_params(seed=0):
    """Host params; norms and biases are drawn at random too, so that none is neutral."""
    _, params = split(Decoder(TINY, jax.random.key(seed)))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: np.asarray(p) + 0.1 * rng.standard_normal(p.shape).astype(np.float32), params)


GRAPHDEF = abstract(TINY)[0]


@jax.jit
def row_logprobs(params, ids, live):
    """One unpacked sequence, whole logits: log p of each token but the first, float32 [WIDTH - 1]."""
    decoder = nnx.merge(GRAPHDEF, params)
    positions = jnp.arange(WIDTH, dtype=jnp.int32)[None]
    logits = decoder.logits(decoder.hidden(ids, positions, live, jnp.zeros_like(live)))
    logp = jax.nn.log_softmax(logits[0])
    return jnp.take_along_axis(logp[:-1], ids[0, 1:, None], axis=-1)[:, 0]


def alone(params, prompt, answer):
    """Log-probs of an answer's trained tokens after its prompt, from a row of its own, float64."""
    ids = np.zeros((1, WIDTH), np.int32)
    n = len(prompt) + len(answer.ids)
    ids[0, :n] = (*prompt, *answer.ids)
    logp = np.asarray(row_logprobs(params, ids, (np.arange(WIDTH) < n).astype(np.int32)[None]), np.float64)
    return logp[len(prompt) - 1 : n - 1][np.array(answer.trained)]


class Trainer:
    """The update of one algorithm, shape and mesh on the tiny decoder, by SGD with rate 1."""

    def __init__(self, algorithm, sizes, answers, *, examples, budget, length=None, mesh=()):
        mesh = make_mesh(dict(mesh), jax.devices()[: int(np.prod([n for _, n in mesh], initial=1))])
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        self.shape = example_shape(
            sizes,
            answers,
            examples_per_step=examples,
            tokens_per_microbatch=budget,
            row_length=length,
            batch_shards=shards,
        )
        self.algorithm, self.optimizer = algorithm, Optimizer(optax.identity(), lambda _: jnp.float32(1), None)
        graphdef, params, axes = abstract(TINY)
        self.shardings = state_shardings(params, axes, self.optimizer, mesh)
        self.batch_shardings = example_shardings(self.shape, mesh)
        forward = language_model(graphdef, self.batch_shardings, chunk=16)
        self._score = make_forward(
            forward, params_shardings=self.shardings.params, batch_shardings=self.batch_shardings
        )
        self._update = make_offline_update(
            forward,
            self.optimizer,
            offline_loss(algorithm),
            shardings=self.shardings,
            batch_shardings=self.batch_shardings,
        )

    def step(self, params, examples, reference=None, constant=0.0, aggregation="token-mean"):
        """Parameters after one update, metrics, and how many micro-batches it took."""
        batch, n_micro, _ = pack_examples(examples, self.shape, example_weights(examples, aggregation))
        batch = place(batch, self.batch_shardings)
        if reference is not None:
            ref_logp = self._score(place(reference, self.shardings.params), batch, np.int32(n_micro))
            batch = batch._replace(rows=batch.rows._replace(ref_logp=ref_logp))
        state = init_state(params, self.optimizer, self.shardings)
        state, metrics = self._update(state, batch, np.float32(constant), np.int32(n_micro))
        return jax.device_get(state.params), jax.device_get(metrics), n_micro


def assert_trees_close(actual, expected, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), actual, expected)
