"""Rollouts that stop early: what goes on is what would have been, under the policy of each token's own step."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_post.loops.groups import completion_from_json, completion_to_json
from jaxrl_post.models.decoder import abstract
from jaxrl_post.rollout.logits import extend, no_history
from jaxrl_post.rollout.partial import Begun, Partial, Start, beginnings, enough, quotas, remembered
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.sampling import Features, Sampling
from jaxrl_post.rollout.schedule import SampleOptions
from jaxrl_post.rollout.stop_strings import compile_strings
from jaxrl_post.types import Completion, StopReason
from sharding.placement import place, tree_shardings
from sharding.rules import ROLLOUT
from tests.rollout.tiny_engine import CONFIG, STOPS, mesh_of, model

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19], [20, 21]]
G, R, STEP = 3, 24, 4
TOP = 2  # likeliest ids of each place, in all of these rollouts


@functools.cache
def sampler(devices=1, axes=()):
    return Sampler(model()[0], CONFIG, mesh_of(devices, **dict(axes)), STOPS[::3])


@functools.cache
def params(scale=1.0, devices=1, axes=()):
    _, shapes, names = abstract(CONFIG)
    whole = jax.tree.map(lambda x: x * scale, model()[1])
    return place(whole, tree_shardings(names, shapes, ROLLOUT, mesh_of(devices, **dict(axes))))


def generate(starts, fraction, of="samples", step=STEP, scale=1.0, devices=1, axes=(), **options):
    asked = SampleOptions(samples_per_prompt=G, max_new_tokens=R, prefill_columns=5, top_logprobs=TOP, **options)
    partial = None if starts is None else Partial(fraction, of, starts)
    who, weights = sampler(devices, axes), params(scale, devices, axes)
    return who.generate(weights, PROMPTS, asked, seed=3, step=step, width=12, partial=partial)


def fresh(step=STEP):
    return [Start(3, step, i) for i in range(len(PROMPTS) * G)]


def going_on(starts, rollout, urgent=False):
    return [
        dataclasses.replace(start, so_far=c, urgent=urgent)
        for start, c in zip(starts, rollout.completions, strict=True)
    ]


def unfinished(rollout):
    return [c.stop is StopReason.UNFINISHED for c in rollout.completions]


def same(a, b):
    for x, y in zip(a.completions, b.completions, strict=True):
        assert (x.ids.tolist(), x.stop) == (y.ids.tolist(), y.stop)
        np.testing.assert_allclose(x.logp, y.logp, atol=1e-5)
        np.testing.assert_allclose(x.raw_logp, y.raw_logp, atol=1e-5)
        np.testing.assert_array_equal(x.top_ids, y.top_ids)
        np.testing.assert_allclose(x.top_logp, y.top_logp, atol=1e-5)


@functools.cache
def whole():
    return generate(None, 1.0)


PLANS = [{}, {"slots": 6, "refill": 3}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.slow
def test_a_sample_finished_over_several_rollouts_is_the_one_finished_in_one(plan):
    """The same weights throughout: ids are equal, log-probs to 1e-5, whatever the slots, at any clock."""
    first = generate(fresh(), 0.2, **plan)
    second = generate(going_on(fresh(), first, urgent=True), 0.2, step=STEP + 1, **plan)
    begun = [len(c.ids) for c, more in zip(first.completions, unfinished(first), strict=True) if more]
    assert len(begun) >= 4
    assert max(begun) > 10
    assert not any(unfinished(second))
    same(second, whole())
    assert max(first.decode_steps) < max(whole().decode_steps)
    for c, before, more in zip(second.completions, first.completions, unfinished(first), strict=True):
        n = len(before.ids)
        assert c.versions.tolist() == [STEP] * n + [STEP + 1] * (len(c.ids) - n)
        assert (len(c.ids) > n) == more


def test_where_all_must_finish_nothing_changes():
    everything = generate(fresh(), 1.0)
    same(everything, whole())
    assert everything.decode_steps == whole().decode_steps


def test_what_goes_on_is_drawn_and_scored_by_the_new_weights():
    """Against one uncached forward pass of the new weights over prompt and response; what was there stays as it was."""
    first = generate(fresh(), 0.2)
    second = generate(going_on(fresh(), first, urgent=True), 0.2, step=STEP + 1, scale=1.3)
    moved = 0
    for c, before, more in zip(second.completions, first.completions, unfinished(first), strict=True):
        n = len(before.ids)
        for name in ("logp", "raw_logp", "top_ids", "top_logp"):
            np.testing.assert_array_equal(getattr(c, name)[:n], getattr(before, name))
        if more:
            logp_nV = full_logp(params(1.3), PROMPTS[c.prompt], c.ids)
            expected = logp_nV[np.arange(len(c.ids)), c.ids]
            np.testing.assert_allclose(c.logp[n:], expected[n:], atol=1e-4)
            np.testing.assert_allclose(c.top_logp[n:], -np.sort(-logp_nV)[n:, :TOP], atol=1e-4)
            np.testing.assert_allclose(np.take_along_axis(logp_nV, c.top_ids, 1)[n:], c.top_logp[n:], atol=1e-4)
            moved += abs(expected[:n] - before.logp).max() > 0.1
    assert moved >= 3


@functools.cache
def _full():
    def logits(params, tokens_1T):
        decoder = nnx.merge(model()[0], params)
        ones = jnp.ones_like(tokens_1T)
        return decoder.logits(decoder.hidden(tokens_1T, jnp.arange(tokens_1T.shape[1])[None], ones, ones - 1))[0]

    return jax.jit(logits)


def full_logp(weights, prompt, ids):
    sequence = [*prompt, *ids]
    z = np.asarray(_full()(weights, jnp.array([sequence + [0] * (48 - len(sequence))])), np.float64)
    z = z[len(prompt) - 1 : len(sequence) - 1]
    z -= z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.mark.slow
def test_each_replica_stops_by_its_own_count_or_with_the_last_in_lockstep():
    """Two groups a replica: the first has one of twelve tokens at most, the second none below the limit."""
    two = {"devices": 2, "axes": (("data", 2),)}
    lengths = np.array([len(c.ids) for c in whole().completions]).reshape(2, 2, G)
    first_whole = lengths.max(axis=-1).min(axis=-1) - 1  # tokens after the one that prefill gives
    free = generate(fresh(), 0.2, **two)
    assert free.decode_steps == tuple(first_whole)
    assert first_whole[0] < first_whole[1]
    same(generate(going_on(fresh(), free, urgent=True), 0.2, step=STEP + 1, **two), whole())
    assert generate(fresh(), 0.2, lockstep=True, **two).decode_steps == (max(first_whole),) * 2


def begun_of(quota, urgent):
    nothing = np.zeros(6)
    return Begun(nothing, nothing, nothing, nothing, nothing, nothing, np.array(urgent), np.array([quota]))


ASKED = np.array([24, 24, 24, 0, 24, 24])  # two groups of three; one sample of the second had finished before


@pytest.mark.parametrize(
    ("of", "quota", "stops", "urgent", "expected"),
    [
        ("samples", 2, [1, 2, 0, 1, 0, 0], [], False),  # enough samples, no whole group
        ("samples", 3, [1, 2, 0, 1, 1, 0], [], False),
        ("samples", 2, [0, 0, 0, 1, 1, 2], [], True),
        ("samples", 3, [0, 0, 0, 1, 1, 2], [], False),  # what had finished before does not count
        ("groups", 1, [1, 1, 2, 1, 0, 0], [], True),
        ("groups", 2, [1, 1, 2, 1, 1, 0], [], False),
        ("samples", 2, [0, 0, 0, 1, 1, 2], [2], False),
        ("samples", 2, [0, 0, 1, 1, 1, 2], [2], True),
    ],
)
def test_a_rollout_stops_by_hand(of, quota, stops, urgent, expected):
    flags = [i in urgent for i in range(6)]
    assert bool(enough(begun_of(quota, flags), of, 3, jnp.array(ASKED), jnp.array(stops))) is expected


def test_quotas_count_what_each_replica_is_asked_for():
    live = np.array([1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, 0], bool)  # two replicas of two groups of three
    assert quotas(live, 3, Partial(0.8, "samples", []), 2).tolist() == [5, 2]
    assert quotas(live, 3, Partial(0.5, "groups", []), 2).tolist() == [1, 1]
    assert quotas(np.ones(240, bool), 3, Partial(0.7, "samples", []), 1).tolist() == [168]  # 0.7 · 240 in floats: more


def test_penalties_and_stop_strings_remember_what_was_sampled_before():
    """As over one rollout: counts, the last tokens, and half a stop string, at the end of what an earlier one left."""
    words = np.full((3, 1, 3), 1)
    options = Sampling(*np.ones((3, 3)), min_p=np.ones(3), bad_words=words)
    features = dataclasses.replace(
        Features.of(Sampling(*np.zeros((3, 3)))), repetition=True, counted=True, bad_words=True, stop_strings=True
    )
    automaton = compile_strings(["cab"], [b"a", b"b", b"c", b"ca"])
    empty = no_history(jnp.array([[0, 1], [2, 2], [3, 3]]), jnp.array([2, 1, 2]), options, features, 4, 8)
    tokens, before = jnp.array([[0, 1, 2, 0], [2, 0, 9, 9], [9, 9, 9, 9]]), jnp.array([4, 2, 0])
    found = remembered(empty, tokens, before, automaton)
    np.testing.assert_array_equal(found.output, [[2, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(found.recent, [[2, 0], [2, 0], [-1, -1]])
    assert found.text[0] == found.text[1] != found.text[2] == 0
    np.testing.assert_array_equal(extend(found, jnp.array([1, 1, 1]), automaton)[1], [1, 1, 0])


def begun(n, top):
    """A sample with n tokens and the `top` likeliest ids of each; None has none."""
    likely = (None, None) if top is None else (np.arange(n * top).reshape(n, top), -np.ones((n, top), np.float32))
    ids, logp = np.arange(n, dtype=np.int32), np.zeros(n, np.float32)
    return Completion(0, ids, logp, logp, StopReason.UNFINISHED, None, *likely)


def test_likeliest_tokens_are_kept_as_far_as_a_request_asks_for_them():
    starts = [Start(3, 1, i, so_far) for i, so_far in enumerate([begun(2, 3), begun(0, None), begun(1, None), None])]
    kept, _ = beginnings(Partial(0.5, "samples", starts), [2, 1, 0, 2], 4, 2, 4, 1)
    np.testing.assert_array_equal(kept.top_ids[0], [[0, 1], [3, 4], [0, 0], [0, 0]])
    np.testing.assert_array_equal(kept.top_logp[0, :, 0], [-1, -1, 0, 0])
    assert not kept.top_ids[1:].any()
    assert beginnings(Partial(0.5, "samples", starts), [0] * 4, 4, 2, 4, 1)[0].top_ids is None


@pytest.mark.parametrize(("had", "known"), [(None, 0), (1, 1)])
def test_likeliest_tokens_that_nobody_kept_are_refused(had, known):
    starts = [Start(3, 1, 0), Start(3, 1, 1, begun(2, had))]
    message = rf"request 1 goes on with top_logprobs=2, and its 2 tokens were sampled with top_logprobs={known}"
    with pytest.raises(ValueError, match=message):
        beginnings(Partial(0.5, "samples", starts), [2, 2], 2, 2, 4, 1)


def test_likeliest_tokens_survive_a_checkpoint_bit_for_bit():
    before = dataclasses.replace(begun(2, 3), top_logp=np.log(np.arange(1, 7, dtype=np.float32)).reshape(2, 3))
    after = completion_from_json(json.loads(json.dumps(completion_to_json(before))))
    np.testing.assert_array_equal(after.top_ids, before.top_ids)
    np.testing.assert_array_equal(after.top_logp, before.top_logp)
    assert (after.top_logp.dtype, after.top_ids.dtype) == (np.float32, np.int32)
