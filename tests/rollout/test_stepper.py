"""The host-driven engine samples what the in-graph engine samples, whenever and wherever its requests run."""

import functools
import itertools

import jax
import numpy as np
import pytest
from tiny_engine import CONFIG, engine, mesh_of, model, sampler

from jaxrl_post.rollout.decoding import Decoding
from jaxrl_post.rollout.schedule import SampleOptions
from jaxrl_post.rollout.step_records import Request
from jaxrl_post.rollout.step_widths import decode_columns, lengths_of_every_width, prefix_columns
from jaxrl_post.rollout.stepper import StepEngine
from jaxrl_post.types import StopReason

PROMPTS = [[5, 6, 7, 8], [9], list(range(1, 22)), [60, 61], [33, 34, 35], [71] * 9]
LIMITS = [10, 3, 7, 10, 1, 10]
GREEDY = Decoding(temperature=0.0)


@functools.cache
def expected(**decoding):
    options = SampleOptions(max_new_tokens=10, **decoding)
    return sampler().generate(model()[1], PROMPTS, options, seed=3, step=2, limits=LIMITS).completions


def request(i, limit=None, seed=3, **decoding):
    return Request(LIMITS[i] if limit is None else limit, Decoding(**decoding), id=i, seed=seed, step=2)


def collect(answers, of_slot, bursts):
    for slot, burst in bursts.items():
        answers.setdefault(of_slot[slot], []).append(burst)


def together(bursts, name):
    return np.concatenate([getattr(burst, name) for burst in bursts])


def serve(made, weights, order, **kw):
    """Every prompt in this order, as slots become free; bursts by prompt."""
    answers, of_slot, waiting = {}, {}, list(order)
    while waiting or any(slot.request for slot in made.slots):
        for i, slot in enumerate(made.slots):
            if slot.request is None and waiting:
                made.free(i)
                of_slot[i] = waiting.pop(0)
                prefix = made.prefill(weights, PROMPTS[of_slot[i]])
                made.insert(prefix, i, request(of_slot[i], **kw))
        collect(answers, of_slot, made.generate(weights))
    for i in range(len(made.slots)):
        made.free(i)
    return answers


def assert_equal(answers, completions):
    assert sorted(answers) == list(range(len(PROMPTS)))
    for i, completion in enumerate(completions):
        assert together(answers[i], "ids").tolist() == completion.ids.tolist()
        np.testing.assert_allclose(together(answers[i], "logp"), completion.logp, atol=1e-5)
        np.testing.assert_allclose(together(answers[i], "raw_logp"), completion.raw_logp, atol=1e-5)
        assert [b.stop for b in answers[i]] == [None] * (len(answers[i]) - 1) + [completion.stop]


@pytest.mark.parametrize("order", [range(6), [5, 3, 1, 4, 2, 0]])
def test_requests_in_any_slot_and_order_are_those_of_the_in_graph_engine(order):
    assert {c.stop for c in expected()} == {StopReason.STOP, StopReason.LENGTH}
    assert_equal(serve(*engine(), order), expected())


OPTIONS = {
    "greedy": {"temperature": 0.0, "top_logprobs": 3},
    "cuts_bias_and_strings": {
        "temperature": 0.7, "top_p": 0.9, "min_p": 0.001, "logit_bias": ((3, 2.0), (9, -3.0), (11, 1.0)),
        "stop": ("ab", "q"),
    },
    "penalties_and_bans": {
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_tokens": 4,
        "bad_words": ((5, 6), (44,)), "stop_ids": (11, 30, 31, 32, 33), "ignore_eos": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow
def test_options_are_those_of_the_in_graph_engine(name):
    answers = serve(*engine(), range(6), **OPTIONS[name])
    assert_equal(answers, expected(**OPTIONS[name]))
    assert [bursts[-1].stop_string for _, bursts in sorted(answers.items())] == [
        c.stop_string for c in expected(**OPTIONS[name])
    ]
    assert [c.ids.tolist() for c in expected(**OPTIONS[name])] != [c.ids.tolist() for c in expected()]


def test_every_mesh_gives_the_same_ids():
    assert_equal(serve(*engine(8, (("fsdp", 4), ("tensor", 2))), range(6)), expected())


def test_the_likeliest_tokens_are_in_falling_order_and_hold_the_greedy_one():
    answers = serve(*engine(), range(6), **OPTIONS["greedy"])
    for bursts in answers.values():
        top_ids, top_logp = together(bursts, "top_ids"), together(bursts, "top_logp")
        assert (top_ids[:, 0] == together(bursts, "ids")).all()
        np.testing.assert_allclose(top_logp[:, 0], together(bursts, "raw_logp"), atol=1e-5)
        assert (np.diff(top_logp, axis=1) <= 0).all()
        assert top_ids.shape[1] == 3


def test_a_long_prompt_is_prefilled_between_the_steps_of_a_running_slot():
    made, weights = engine()
    answers, of_slot = {}, {0: 0, 1: 2}
    made.insert(made.prefill(weights, PROMPTS[0]), 0, request(0))
    prefix, pieces = made.begin(PROMPTS[2]), 0
    while not prefix.ready:
        prefix, pieces = made.advance(weights, prefix), pieces + 1
        collect(answers, of_slot, made.generate(weights))
    assert pieces == 3
    assert len(together(answers[0], "ids")) == min(9, len(expected()[0].ids))
    made.insert(prefix, 1, request(2))
    while made.slots[0].request or made.slots[1].request:
        collect(answers, of_slot, made.generate(weights))
    for i in (0, 2):
        assert together(answers[i], "ids").tolist() == expected()[i].ids.tolist()
    made.free(0), made.free(1)


def test_one_prefix_serves_several_slots():
    made, weights = engine()
    prefix = made.prefill(weights, PROMPTS[2])
    for slot in (0, 1):
        made.insert(prefix, slot, request(2, seed=slot, limit=3))
    bursts = made.generate(weights)
    options = SampleOptions(max_new_tokens=10)
    for slot in (0, 1):
        alone = sampler().generate(
            model()[1], [PROMPTS[0], PROMPTS[1], PROMPTS[2]], options, seed=slot, step=2, limits=[0, 0, 3], width=32
        )
        assert bursts[slot].ids.tolist() == alone.completions[2].ids.tolist()
        made.free(slot)


def test_a_sequence_goes_on_after_appended_tokens_as_if_it_were_a_prompt():
    """At every length, so that pieces of all sizes end at the slot's last column."""
    made, weights = engine()
    turns = [(PROMPTS[2], 5), ([40, 41, 42], 4), ([50], 3), ([60] * 5, 2), ([], 2)]
    made.insert(made.prefill(weights, turns[0][0]), 1, Request(turns[0][1], GREEDY))
    ids = []
    for number, (appended, limit) in enumerate(turns):
        ids += appended
        if number:
            made.extend(1, appended, Request(limit, GREEDY, seed=number))
            while not made.feed(weights, 1):
                pass
        bursts = []
        while made.slots[1].request:
            bursts.append(made.generate(weights)[1])
        options = SampleOptions(max_new_tokens=10, temperature=0.0)
        [fresh] = sampler().generate(model()[1], [ids], options, seed=0, step=0, limits=[limit], width=64).completions
        assert together(bursts, "ids").tolist() == fresh.ids.tolist()
        np.testing.assert_allclose(together(bursts, "raw_logp"), fresh.raw_logp, atol=1e-5)
        ids += fresh.ids.tolist()
    made.free(1)


def test_pieces_fit_the_room_there_is():
    made, _ = engine()
    for room, count in itertools.product(range(1, 20), range(1, 20)):
        if count <= room:
            piece, used = made._next_piece(list(range(1, count + 1)), room)
            assert piece.shape[1] <= min(room, 8)
            assert piece[0, :used].tolist() == list(range(1, used + 1))
            assert 1 <= used <= count


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_prompt_cut_anywhere_is_the_whole_prompt(cut):
    """The first part is prefilled on its own, the rest follows in the slot."""
    made, weights = engine()
    made.insert(made.prefill(weights, PROMPTS[5][:cut]), 1, request(5, limit=1))
    made.pause(1)
    made.extend(1, PROMPTS[5][cut:], request(5))
    while not made.feed(weights, 1):
        pass
    bursts = []
    while made.slots[1].request:
        bursts.append(made.generate(weights)[1])
    assert together(bursts, "ids").tolist() == expected()[5].ids.tolist()
    np.testing.assert_allclose(together(bursts, "raw_logp"), expected()[5].raw_logp, atol=1e-5)
    made.free(1)


def test_after_compile_all_no_length_compiles():
    made, weights = engine()
    programs = made._programs
    assert list(made.compile_all(weights, Decoding())) == [1, 2, 10, 18, 34]
    compiles = lambda: (programs.prefill._cache_size(), programs.insert._cache_size(), len(programs._decodes))
    before = compiles()
    for tokens in range(1, made.columns):
        made.insert(made.prefill(weights, [3] * tokens), 1, Request(1))
        made.generate(weights)
        made.free(1)
    assert compiles() == before


def test_lengths_of_every_width_are_few_and_leave_no_width_out():
    lengths = list(lengths_of_every_width(2048, 512, 4))
    assert len(lengths) < 32
    widths = lambda tokens: (prefix_columns(tokens, 2048), decode_columns(tokens - 1, 4, 2048))
    assert {x for n in lengths for x in widths(n)} == {x for n in range(1, 2048) for x in widths(n)}


def test_weights_are_held_once():
    weights = engine()[1]
    assert sum(x.nbytes for x in jax.tree.leaves(weights)) == sum(x.nbytes for x in jax.tree.leaves(model()[1]))


def test_compiles_are_few():
    made, _ = engine()
    assert made._programs.prefill._cache_size() <= 4
    assert len(made._programs._decodes) <= 1 + len(OPTIONS)


def test_bad_requests_are_refused_by_name():
    made, weights = engine()
    with pytest.raises(ValueError, match="no tokens"):
        made.begin([])
    with pytest.raises(ValueError, match="48 tokens and leaves no room"):
        made.begin([1] * 48)
    prefix = made.prefill(weights, [1, 2, 3])
    with pytest.raises(ValueError, match="3 tokens and 46 new ones exceed the 48"):
        made.insert(prefix, 0, Request(46))
    with pytest.raises(ValueError, match="limit=0"):
        made.insert(prefix, 0, Request(0))
    with pytest.raises(ValueError, match="slot 0 is free"):
        made.extend(0, [1], Request(1))
    made.insert(prefix, 0, Request(1))
    with pytest.raises(ValueError, match="slot 0 is taken"):
        made.insert(prefix, 0, Request(1))
    made.free(0)
    with pytest.raises(ValueError, match=r"stop ids \[98\]"):
        StepEngine(model()[0], CONFIG, mesh_of(), (98,), slots=2, columns=16)
    with pytest.raises(ValueError, match="slots=3 must be a multiple of the mesh's 4"):
        StepEngine(model()[0], CONFIG, mesh_of(8, fsdp=4, tensor=2), (), slots=3, columns=16)
    with pytest.raises(ValueError, match="2048 positions"):
        StepEngine(model()[0], CONFIG, mesh_of(), (), slots=2, columns=2049)
