"""Rollouts of a mixture: the same samples on any mesh, and a record of each token's experts for the trainer to use."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_post.models.config import Experts, ModelConfig
from jaxrl_post.models.decoder import Decoder, abstract, split
from jaxrl_post.rollout.decoding import Decoding
from jaxrl_post.rollout.sampler import SampleOptions, Sampler
from jaxrl_post.rollout.step_records import Request
from jaxrl_post.rollout.stepper import StepEngine
from sharding import ROLLOUT, make_mesh, place, tree_shardings

CONFIG = ModelConfig(
    "qwen3_moe", 98, 32, 64, 2, 4, 2, 16, initializer_range=0.3, moe=Experts(8, 2, 16)
)  # fmt: skip
PROMPTS = [[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7], [60, 61], [33, 34, 35]]
STOPS = (7, *range(84, 98))
EXCHANGING = dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, dispatch="padded"))
MESHES = {
    "expert=2": (CONFIG, {"expert": 2}),
    "data=2 expert=2 tensor=2": (CONFIG, {"data": 2, "expert": 2, "tensor": 2}),
    "expert=8 all_to_all": (EXCHANGING, {"expert": 8}),
    "data=2 expert=2 tensor=2 all_to_all": (EXCHANGING, {"data": 2, "expert": 2, "tensor": 2}),
}
pytestmark = pytest.mark.slow


@functools.cache
def model():
    return split(Decoder(CONFIG, jax.random.key(0)))


def placed(mesh):
    _, shapes, axes = abstract(CONFIG)
    return place(model()[1], tree_shardings(axes, shapes, ROLLOUT, mesh))


def mesh_of(sizes):
    return make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))])


def rollout(sizes, config=CONFIG, **options):
    mesh, graphdef = mesh_of(sizes), abstract(config)[0]
    asked = SampleOptions(samples_per_prompt=3, max_new_tokens=10, routing=True, **options)
    return Sampler(graphdef, config, mesh, STOPS).generate(placed(mesh), PROMPTS, asked, seed=0, step=1, width=8)


@functools.cache
def alone():
    return rollout({})


@functools.cache
def trainer():
    """Jitted (tokens [1, 17], choices or None) -> log-probs of all tokens, and the routing."""

    def run(tokens_1T, choices_LBTk):
        decoder, one = nnx.merge(*model()), jnp.ones_like(tokens_1T)
        at = jnp.arange(tokens_1T.shape[1])[None]
        x_BTD, routing = decoder.routed(tokens_1T, at, one, 0 * one, choices_LBTk=choices_LBTk)
        return jax.nn.log_softmax(decoder.logits(x_BTD))[0], routing

    return jax.jit(run)


def test_the_record_is_what_the_trainer_would_choose_and_replayed_gives_the_samplers_log_probs():
    for c in alone().completions:
        ids = np.array([*PROMPTS[c.prompt], *c.ids])
        p, n = len(PROMPTS[c.prompt]), len(c.ids)
        assert c.choices.shape == (p + n - 1, 2, 2)
        assert c.choices.dtype == np.uint8
        tokens = np.zeros((1, 17), np.int32)
        tokens[0, : p + n] = ids
        logp, routing = trainer()(tokens, None)
        np.testing.assert_array_equal(np.moveaxis(routing.choices, 0, 2)[0, : p + n - 1], c.choices)
        padded = np.zeros((1, 17, 2, 2), np.uint8)
        padded[0, : p + n - 1] = c.choices
        replayed, _ = trainer()(tokens, np.moveaxis(padded, 2, 0))
        for found in (logp, replayed):
            np.testing.assert_allclose(found[np.arange(p - 1, p + n - 1), c.ids], c.logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("config", "sizes"), MESHES.values(), ids=MESHES)
def test_replicas_that_share_experts_sample_what_one_device_does(config, sizes):
    """Their prompts and lengths differ: they must run equally many steps, and those of other replicas need not."""
    found = rollout(sizes, config)
    assert len({c.ids.tobytes() for c in found.completions}) > 5
    for a, b in zip(found.completions, alone().completions, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.choices, b.choices)
        np.testing.assert_allclose(a.logp, b.logp, rtol=0, atol=1e-5)
    steps = np.reshape(found.decode_steps, (-1, sizes["expert"]))
    np.testing.assert_array_equal(steps, steps[:, :1].repeat(sizes["expert"], axis=1))


@pytest.mark.parametrize("config", [CONFIG, EXCHANGING], ids=["gather", "all_to_all"])
def test_few_slots_refilled_on_shared_experts_change_nothing(config):
    found = rollout({"expert": 2}, config, slots=3, refill=1)
    for a, b in zip(found.completions, alone().completions, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.choices, b.choices)


@pytest.mark.parametrize("config", [CONFIG, EXCHANGING], ids=["gather", "all_to_all"])
def test_the_host_driven_engine_samples_the_same_with_experts_cut_over_the_mesh(config):
    mesh = mesh_of({"expert": 2})
    engine = StepEngine(abstract(config)[0], config, mesh, STOPS, slots=2, columns=24, steps=3, piece=8)
    weights = engine.load(placed(mesh))
    for i in (0, 2):
        engine.insert(engine.prefill(weights, PROMPTS[i]), i // 2, Request(10, Decoding(), id=3 * i, seed=0, step=1))
    found = {0: [], 1: []}
    while any(slot.request for slot in engine.slots):
        for slot, burst in engine.generate(weights).items():
            found[slot] += [*burst.ids]
    for i in (0, 2):
        np.testing.assert_array_equal(found[i // 2], alone().completions[3 * i].ids)
