"""A conversation on its own cache is the one sampled from scratch at every turn, and the trainer's."""

import functools
import time

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_engine import engine, model, sampler

from jaxrl_post.rollout.conversation import Ending, converse, turn_seed
from jaxrl_post.rollout.schedule import SampleOptions
from jaxrl_post.rollout.step_records import Request
from jaxrl_post.training.logprobs import token_logprobs
from jaxrl_post.types import StopReason

PROMPTS = [[5, 6, 7, 8], [9], list(range(1, 12)), [60, 61], [33, 34, 35], [71] * 9]
TURNS, LIMIT = 3, 12
WORDS = {0: [40, 41, 42], 1: [50], 2: [], 3: None, 4: [60] * 9, 5: [11, 12]}


def environment(number, ids):
    assert tuple(ids[: len(PROMPTS[number])]) == tuple(PROMPTS[number])
    return WORDS[number]


@functools.cache
def conversations():
    made, weights = engine()
    request = Request(LIMIT, seed=3, step=2)
    return converse(made, weights, PROMPTS, environment, max_turns=TURNS, request=request)


def test_every_turn_is_that_sampled_from_scratch_after_all_that_came_before():
    """The in-graph engine is handed each conversation so far, appended text included, as its prompt."""
    talks, made = conversations(), engine()[0]
    so_far = [list(p) for p in PROMPTS]
    places, open_talks, seen = [0] * len(PROMPTS), set(range(len(PROMPTS))), 0
    for turn in range(TURNS):
        limits = [min(LIMIT, made.columns - len(ids)) if i in open_talks else 0 for i, ids in enumerate(so_far)]
        options = SampleOptions(max_new_tokens=LIMIT)
        seed = turn_seed(3, turn)
        fresh = sampler().generate(model()[1], so_far, options, seed=seed, step=2, limits=limits, width=64).completions
        for i in sorted(open_talks):
            end = places[i] + len(fresh[i].ids)
            part = slice(places[i], end)
            assert talks[i].ids[part].tolist() == fresh[i].ids.tolist()
            np.testing.assert_allclose(talks[i].logp[part], fresh[i].logp, atol=1e-4)
            np.testing.assert_allclose(talks[i].raw_logp[part], fresh[i].raw_logp, atol=1e-4)
            assert talks[i].mask[part].all()
            so_far[i] += fresh[i].ids.tolist()
            word, seen = WORDS[i], seen + 1
            ending = (
                Ending.LENGTH if fresh[i].stop is StopReason.LENGTH
                else Ending.TURNS if turn + 1 == TURNS
                else Ending.DONE if word is None
                else Ending.LENGTH if len(so_far[i]) + len(word) >= made.columns
                else None
            )  # fmt: skip
            if ending is not None:
                open_talks.discard(i)
                assert (end, turn + 1, ending) == (len(talks[i].ids), talks[i].turns, talks[i].ending)
                continue
            assert talks[i].ids[end : end + len(word)].tolist() == word
            assert not talks[i].mask[end : end + len(word)].any()
            assert not talks[i].logp[end : end + len(word)].any()
            so_far[i] += word
            places[i] = end + len(word)
    assert not open_talks
    assert seen > len(PROMPTS)


def test_the_examples_hold_every_ending_and_several_turns():
    assert {talk.ending for talk in conversations()} == set(Ending)
    assert max(talk.turns for talk in conversations()) == TURNS
    assert all(slot.request is None and not slot.pending for slot in engine()[0].slots)


def test_log_probs_are_the_trainers():
    decoder = nnx.merge(*model())
    for talk in conversations():
        ids, n = [*talk.prompt_ids, *talk.ids.tolist()], len(talk.ids)
        tokens = jnp.array([ids + [0] * (48 - len(ids))])
        ones, last = jnp.ones_like(tokens), len(talk.prompt_ids) - 1
        logp, _ = token_logprobs(
            decoder, tokens, jnp.arange(48)[None], ones, 0 * ones, last + jnp.arange(n)[None],
            jnp.array(talk.ids)[None], jnp.array(talk.mask)[None], temperature=1.0, chunk=16,
        )  # fmt: skip
        own = np.asarray(logp[0]) * talk.mask
        np.testing.assert_allclose(talk.raw_logp, own, atol=1e-4)
        np.testing.assert_allclose(talk.logp, own, atol=1e-4)


def test_slots_and_slow_environments_change_nothing():
    def slow(number, ids):
        time.sleep(0.01 * (number % 3))
        return environment(number, ids)

    made, weights = engine()
    again = converse(made, weights, PROMPTS, slow, max_turns=TURNS, request=Request(LIMIT, seed=3, step=2), workers=1)
    assert [t.ids.tolist() for t in again] == [t.ids.tolist() for t in conversations()]


def test_what_an_environment_raises_is_raised_and_the_slots_are_free():
    def broken(number, ids):
        raise RuntimeError("no tool")

    made, weights = engine()
    with pytest.raises(RuntimeError, match="no tool"):
        converse(made, weights, PROMPTS, broken, max_turns=TURNS, request=Request(LIMIT, seed=3, step=2))
    assert all(slot.request is None and not slot.pending for slot in made.slots)
    with pytest.raises(ValueError, match="max_turns=0"):
        converse(made, weights, PROMPTS, environment, max_turns=0, request=Request(LIMIT))
