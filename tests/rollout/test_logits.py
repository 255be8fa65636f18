"""Penalties, bans and cuts: against a float64 reference, and against transformers' processors on the same logits."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxrl_post.rollout.decoding import Decoding, check, sampling_arrays
from jaxrl_post.rollout.logits import extend, no_history, shaped, stopped
from jaxrl_post.rollout.sampling import Features, draw, likeliest

V = 40
RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=(3, V)).astype(np.float32) * 3
PROMPTS = [[1, 2, 3, 3], [7, 8], [9]]
OUTPUTS = [[4, 4, 5, 2, 4], [8, 8, 8, 1, 0], [3, 9, 30, 31, 30]]


def after(options, outputs=OUTPUTS):
    """The shaped logits once these outputs were sampled, with the option arrays and features they came from."""
    arrays = sampling_arrays(options, eos_ids=(39,), strings=())
    features = Features.of(arrays)
    width = max(map(len, PROMPTS))
    tokens = jnp.array([row + [0] * (width - len(row)) for row in PROMPTS])
    history = no_history(tokens, jnp.array([len(row) for row in PROMPTS]), arrays, features, V, 100)
    for column in np.array(outputs).T:
        history, _ = extend(history, jnp.asarray(column, jnp.int32), None)
    counts = jnp.full(3, len(outputs[0]), jnp.int32)
    return shaped(jnp.asarray(LOGITS), arrays, history, counts, features), arrays, features


def by_hand(options, row):
    """The documented order in float64: bad words, minimum of tokens, bias, repetition, frequency and presence."""
    z, output = LOGITS[row].astype(np.float64), OUTPUTS[row]
    for word in options.bad_words:
        if len(word) == 1 or tuple(output[-len(word) + 1 :]) == word[:-1]:
            z[word[-1]] = -np.inf
    if len(output) < options.min_tokens:
        z[[39, *options.stop_ids]] = -np.inf
    for token, value in options.logit_bias:
        z[token] += value
    for token in {*PROMPTS[row], *output}:
        z[token] = z[token] / options.repetition_penalty if z[token] > 0 else z[token] * options.repetition_penalty
    for token in set(output):
        z[token] -= options.frequency_penalty * output.count(token) + options.presence_penalty
    return z


ALL = Decoding(
    min_tokens=6, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.7, stop_ids=(20,),
    logit_bias=((4, 5.0), (8, -3.0)), bad_words=((12,), (2, 4, 1), (8, 1, 0, 17), (30, 2)),
)  # fmt: skip
MIXES = {
    "all": [ALL, ALL, ALL],
    "each_its_own": [
        Decoding(repetition_penalty=0.7, logit_bias=((0, 1.0),)),
        Decoding(frequency_penalty=1.5, bad_words=((1, 0, 3), (0, 5), (6,))),
        Decoding(presence_penalty=2.0, min_tokens=9, stop_ids=(1, 2)),
    ],
    "none_for_one": [ALL, Decoding(), ALL],
}


@pytest.mark.parametrize("options", MIXES.values(), ids=MIXES)
def test_shaped_logits_equal_the_documented_order_in_float64(options):
    scores, _, _ = after(options)
    expected = np.stack([by_hand(o, i) for i, o in enumerate(options)])
    np.testing.assert_allclose(np.asarray(scores), expected, rtol=1e-6, atol=1e-6)
    assert (np.asarray(scores) != LOGITS).any()


def processed(processors, ids, logits):
    out = torch.tensor(logits)[None]
    for processor in processors:
        out = processor(torch.tensor([ids]), out)
    return out[0].numpy()


def test_repetition_bad_words_and_minimum_equal_those_of_transformers():
    options = Decoding(repetition_penalty=1.2)
    scores, _, _ = after([options] * 3)
    for row in range(3):
        rule = transformers.RepetitionPenaltyLogitsProcessor(1.2)
        np.testing.assert_allclose(scores[row], processed([rule], PROMPTS[row] + OUTPUTS[row], LOGITS[row]), rtol=1e-6)
    words = ((12,), (4, 11), (2, 4, 13), (31, 30, 14), (1, 0, 15), (1, 1, 16))
    scores, _, _ = after([Decoding(bad_words=words, min_tokens=6, stop_ids=(20,))] * 3)
    for row in range(3):
        rules = [
            transformers.NoBadWordsLogitsProcessor([list(word) for word in words]),
            transformers.MinNewTokensLengthLogitsProcessor(0, 6, [20, 39], device="cpu"),
        ]
        expected = processed(rules, OUTPUTS[row], LOGITS[row])
        np.testing.assert_array_equal(np.asarray(scores[row]), expected)
        assert np.isinf(expected).sum() >= 4


@pytest.mark.parametrize("options", [Decoding(min_p=0.05), Decoding(temperature=0.7, min_p=0.02, top_k=9, top_p=0.9)])
def test_probabilities_after_the_cuts_equal_those_of_transformers(options):
    arrays = sampling_arrays([options] * 400, (), ())
    logits = jnp.broadcast_to(LOGITS[0], (400, V))
    out = draw(logits, arrays, jnp.asarray(RNG.uniform(size=(400, 2)), jnp.float32), Features.of(arrays))
    cuts = [transformers.MinPLogitsWarper(options.min_p)]
    cuts += [transformers.TopKLogitsWarper(options.top_k)] if options.top_k else []
    cuts += [transformers.TopPLogitsWarper(options.top_p)] if options.top_p < 1 else []
    z = processed([transformers.TemperatureLogitsWarper(options.temperature), *cuts], [0], LOGITS[0]).astype(np.float64)
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    token = np.asarray(out.token)
    assert set(token) <= set(np.flatnonzero(p))
    assert set(token) >= set(np.flatnonzero(p > 0.05))
    np.testing.assert_allclose(np.asarray(out.logp), np.log(p[token]), rtol=1e-5, atol=1e-6)
    raw = LOGITS[0].astype(np.float64)
    np.testing.assert_allclose(out.raw_logp, (raw - np.log(np.exp(raw).sum()))[token], rtol=1e-5)


def test_log_probs_after_penalties_are_of_the_distribution_drawn_from_and_raw_ones_of_the_model():
    scores, arrays, features = after(MIXES["all"])
    out = draw(jnp.asarray(LOGITS), arrays, jnp.full((3, 2), 0.5), features, scores)
    for row, token in enumerate(np.asarray(out.token)):
        for z, logp in ((by_hand(ALL, row), out.logp), (LOGITS[row].astype(np.float64), out.raw_logp)):
            np.testing.assert_allclose(logp[row], z[token] - np.log(np.exp(z).sum()), rtol=1e-5)
    greedy = arrays._replace(temperature=np.zeros(3, np.float32))
    out = draw(jnp.asarray(LOGITS), greedy, jnp.full((3, 2), 0.5), Features.of(greedy), scores)
    assert out.token.tolist() == [int(np.argmax(by_hand(ALL, row))) for row in range(3)]


@pytest.mark.parametrize(("size", "n"), [(40, 5), (97, 20), (4096, 20)])
def test_the_likeliest_tokens_are_those_of_a_sort(size, n):
    logits = RNG.normal(size=(4, size)).astype(np.float32)
    ids, logp = likeliest(jnp.asarray(logits), n)
    expected = np.argsort(-logits, axis=-1)[:, :n]
    np.testing.assert_array_equal(ids, expected)
    z = logits.astype(np.float64)
    whole = z - np.log(np.exp(z).sum(-1, keepdims=True))
    np.testing.assert_allclose(logp, np.take_along_axis(whole, expected, 1), rtol=1e-5)


def test_counts_hold_more_than_one_hundred_of_a_token():
    arrays = sampling_arrays([Decoding(frequency_penalty=0.25)], (), ())
    features = Features.of(arrays)
    history = no_history(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), arrays, features, V, 40_000)
    assert history.output.dtype == jnp.int32
    history = history._replace(output=history.output.at[0, 5].set(39_999))
    history, _ = extend(history, jnp.array([5]), None)
    scores = shaped(jnp.zeros((1, V)), arrays, history, jnp.array([0]), features)
    assert float(scores[0, 5]) == -10_000.0
    assert (
        no_history(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), arrays, features, V, 99).output.dtype
        == "int16"
    )


def test_stop_ids_are_the_requests_own_and_the_samplers_unless_ignored():
    options = [Decoding(), Decoding(ignore_eos=True), Decoding(ignore_eos=True, stop_ids=(7,))]
    arrays = sampling_arrays(options, (39,), ())
    ends = lambda token: stopped(arrays, jnp.full(3, token), jnp.zeros(3, jnp.uint32), jnp.zeros(3, jnp.int32)).tolist()
    assert ends(39) == [True, False, False]
    assert ends(7) == [False, False, True]
    assert not any(ends(6))


def test_nothing_asked_for_compiles_nothing_in():
    features = Features.of(sampling_arrays([Decoding()] * 2, (39,), ()))
    assert not features.shapes_logits
    assert not any(vars(features).values())
    history = no_history(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32), None, features, V, 9)
    assert history == (None, None, None, None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"min_p": 1.5}, "min_p=1.5 must be 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty=inf must be a finite number"),
        ({"logit_bias": ((40, 1.0),)}, r"logit_bias \[40\] are outside the vocabulary of 40"),
        ({"bad_words": ((1, -1),)}, r"bad_words \[-1\] are outside"),
        ({"bad_words": ((),)}, "at least one id"),
        ({"stop": ("",)}, "at least one character"),
        ({"stop_ids": (99,)}, r"stop ids \[99\] are outside"),
        ({"top_logprobs": 21}, "top_logprobs=21 must be 0 to 20"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, told):
    with pytest.raises(ValueError, match=told):
        check(Decoding(**options), V)
