"""Sampling features inside the engine: same answers on every schedule and mesh, and those of one sequence at a time."""

import functools
import itertools

import jax
import numpy as np
import pytest

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Decoder, abstract, split
from jaxrl_post.rollout.decoding import Decoding
from jaxrl_post.rollout.requests import padded_requests
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.schedule import SampleOptions
from jaxrl_post.types import StopReason
from sharding.mesh import make_mesh, resolve_sizes
from sharding.placement import place, tree_shardings
from sharding.rules import ROLLOUT

V, EOS = 64, 61
CONFIG = ModelConfig("qwen3", V, 16, 32, 1, 4, 2, 8, initializer_range=0.4)
BYTES = [b"", b"ab", b"b", b"a", b"\n", *(bytes([65 + i, 97 + i % 3]) for i in range(V - 5))]
PROMPTS = [[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7]]
GROUP, LIMIT = 2, 12
N = len(PROMPTS) * GROUP
PLAIN = SampleOptions(samples_per_prompt=GROUP, max_new_tokens=LIMIT)
EACH = [
    Decoding(temperature=0.8, min_p=0.02, repetition_penalty=1.4, top_logprobs=3),
    Decoding(presence_penalty=0.9, frequency_penalty=0.6, logit_bias=((3, 2.0), (EOS, 1.0)), top_k=30),
    Decoding(min_tokens=5, stop=("bab", "a\n"), bad_words=((10,), (3, 3), (2, 3, 4)), logit_bias=((2, 3.0), (3, 3.0))),
    Decoding(ignore_eos=True, logit_bias=((EOS, 4.0),), frequency_penalty=0.1, top_p=0.95),
    Decoding(stop_ids=(11, 12), stop=("b",), repetition_penalty=1.1, top_logprobs=5),
    Decoding(temperature=0.0, repetition_penalty=1.2, stop=("ab", "Ba")),
]


def mesh_of(devices=1, **axes):
    return make_mesh(resolve_sizes({"fsdp": 1} | axes, devices), jax.devices()[:devices])


@functools.cache
def model():
    return split(Decoder(CONFIG, jax.random.key(1)))


@functools.cache
def sampler(devices=1, **axes):
    return Sampler(model()[0], CONFIG, mesh_of(devices, **axes), (EOS,), BYTES)


def generate(options=PLAIN, each=tuple(EACH), devices=1, axes=(), prompts=PROMPTS, **kw):
    shardings = tree_shardings(abstract(CONFIG)[2], abstract(CONFIG)[1], ROLLOUT, mesh_of(devices, **dict(axes)))
    who, params = sampler(devices, **dict(axes)), place(model()[1], shardings)
    return who.generate(params, prompts, options, seed=3, step=1, width=8, each=each, **kw)


@functools.cache
def base():
    return generate().completions


def same(a, b):
    assert [c.ids.tolist() for c in a] == [c.ids.tolist() for c in b]
    assert [(c.stop, c.stop_string) for c in a] == [(c.stop, c.stop_string) for c in b]
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x.logp, y.logp, atol=1e-5)
        np.testing.assert_array_equal(x.top_ids, y.top_ids)


@pytest.mark.slow
def test_slots_and_refills_change_nothing_with_every_feature_on():
    options = SampleOptions(samples_per_prompt=GROUP, max_new_tokens=LIMIT, slots=3, refill=1)
    same(generate(options).completions, base())


@pytest.mark.parametrize("axes", [(("data", 8),), (("fsdp", 4), ("tensor", 2))], ids=str)
@pytest.mark.slow
def test_every_mesh_gives_the_same_with_every_feature_on(axes):
    same(generate(devices=8, axes=axes).completions, base())


@pytest.mark.slow
def test_collectives_stay_inside_a_tensor_group_with_every_feature_on():
    axes = (("fsdp", 4), ("tensor", 2))
    generate(devices=8, axes=axes)
    who = sampler(8, **dict(axes))
    [program] = who._compiled.values()
    requests = padded_requests(PROMPTS, EACH, PLAIN, width=8, replicas=4, stop_ids=(EOS,), seed=0)
    shardings = tree_shardings(abstract(CONFIG)[2], abstract(CONFIG)[1], ROLLOUT, mesh_of(8, **dict(axes)))
    [automaton] = who._automata.values()
    lowered = program.lower(place(model()[1], shardings), requests, automaton, np.int32(0))
    text = lowered.compile().as_text()
    assert "collective-permute" not in text
    assert "all-to-all" not in text
    assert "replica_groups=[2,4]<=[" not in text


@pytest.mark.slow
def test_the_likeliest_are_recorded_for_those_who_ask():
    checked = 0
    for i, (c, options) in enumerate(zip(base(), EACH, strict=True)):
        if not options.top_logprobs:
            continue
        assert c.top_ids.shape == (len(c.ids), options.top_logprobs)
        assert (np.diff(c.top_logp, axis=1) <= 0).all()
        for j, token in enumerate(c.ids):
            if token in c.top_ids[j]:
                np.testing.assert_allclose(c.raw_logp[j], c.top_logp[j][c.top_ids[j] == token][0], atol=1e-5)
                checked += 1
        assert (c.raw_logp <= c.top_logp[:, 0] + 1e-5).all(), i
    assert checked > 3


@pytest.mark.slow
def test_each_request_stops_where_its_options_say():
    for c, options in zip(base(), EACH, strict=True):
        hits = [n for n in range(len(c.ids)) if _ends(c.ids[: n + 1], options)]
        assert hits == ([len(c.ids) - 1] if c.stop is StopReason.STOP else [])
        assert (c.stop is StopReason.STOP) or len(c.ids) == LIMIT
        assert (c.stop_string is not None) == (c.stop is StopReason.STOP and not _ends(c.ids, options, strings=False))
        assert c.stop_string is None or c.stop_string in options.stop
    assert any(c.stop_string for c in base())
    assert EOS in base()[3].ids[:-1]


def _ends(ids, options, strings=True):
    """Whether the last id ends the sequence, by a search of its whole text."""
    if ids[-1] in {*options.stop_ids, *(() if options.ignore_eos else (EOS,))}:
        return True
    text, last = b"".join(BYTES[i] for i in ids), len(BYTES[ids[-1]])
    fresh = [s for s in options.stop if text.rfind(s.encode()) + len(s) > len(text) - last and s.encode() in text]
    return bool(strings and fresh and len(ids) > options.min_tokens)


def test_a_bad_word_never_comes_and_its_parts_do():
    ids = base()[2].ids.tolist()
    assert 10 not in ids
    assert (3, 3) not in itertools.pairwise(ids)
    assert (2, 3, 4) not in zip(ids, ids[1:], ids[2:], strict=False)
    assert 3 in ids[:-1]


def test_a_request_gives_the_same_whoever_is_beside_it_and_whether_told_for_all_or_for_each():
    for_all = SampleOptions(samples_per_prompt=GROUP, max_new_tokens=LIMIT, **vars(EACH[4]))
    same(generate(for_all, None).completions[4:5], base()[4:5])


def test_a_seed_of_a_request_keys_its_draws_with_every_feature_on():
    changed = generate(seeds=[3, 3, 3, 99, 3, 3]).completions
    same([c for i, c in enumerate(changed) if i != 3], [c for i, c in enumerate(base()) if i != 3])
    assert changed[3].ids.tolist() != base()[3].ids.tolist()


def test_what_cannot_be_decoded_is_refused():
    with pytest.raises(ValueError, match="each has 2 options for 6 requests"):
        generate(each=[Decoding()] * 2)
    with pytest.raises(ValueError, match=r"stop strings \['x'\] need the bytes of the tokens"):
        Sampler(model()[0], CONFIG, mesh_of(), (EOS,)).generate(
            model()[1], PROMPTS, SampleOptions(stop=("x",)), seed=0, step=0
        )
