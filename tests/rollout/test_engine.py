"""The engine against the plain forward pass, and what must not change its answers: slots, refills, meshes."""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Decoder, abstract, split
from jaxrl_post.rollout.engine import make_rollout
from jaxrl_post.rollout.requests import padded_requests
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.sampling import Sampling
from jaxrl_post.rollout.schedule import SampleOptions, engine_shape
from jaxrl_post.types import StopReason
from sharding.mesh import make_mesh, resolve_sizes
from sharding.placement import place, tree_shardings
from sharding.rules import ROLLOUT

CONFIG = ModelConfig("qwen3", 98, 32, 64, 2, 4, 2, 16, initializer_range=0.3)
PROMPTS = [[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7], [60, 61], [33, 34, 35]]


def mesh_of(devices=1, **axes):
    sizes = {"fsdp": 1} | axes
    return make_mesh(resolve_sizes(sizes, devices), jax.devices()[:devices])


@functools.cache
def model():
    return split(Decoder(CONFIG, jax.random.key(0)))


@functools.cache
def sampler(stop_ids=(96,), devices=1, **axes):
    return Sampler(model()[0], CONFIG, mesh_of(devices, **axes), stop_ids)


def generate(
    prompts=PROMPTS, stop_ids=(96,), devices=1, axes=(), seed=0, step=0, width=None, limits=None, seeds=None, **kw
):
    kw = {"samples_per_prompt": 2, "max_new_tokens": 10} | kw
    who = sampler(stop_ids, devices, **dict(axes))
    params = place(
        model()[1], tree_shardings(abstract(CONFIG)[2], abstract(CONFIG)[1], ROLLOUT, mesh_of(devices, **dict(axes)))
    )
    return who.generate(
        params, prompts, SampleOptions(**kw), seed=seed, step=step, width=width, limits=limits, seeds=seeds
    )


def requests_of(options, replicas=1):
    decoding = [options] * (len(PROMPTS) * options.samples_per_prompt)
    return padded_requests(PROMPTS, decoding, options, width=8, replicas=replicas, stop_ids=(96,), seed=0)


def ids(rollout):
    return [c.ids.tolist() for c in rollout.completions]


@functools.cache
def _full():
    graphdef, _ = model()

    def logits(params, tokens_1T):
        decoder = nnx.merge(graphdef, params)
        ones = jnp.ones_like(tokens_1T)
        return decoder.logits(decoder.hidden(tokens_1T, jnp.arange(tokens_1T.shape[1])[None], ones, ones - 1))[0]

    return jax.jit(logits)


def full_logp(prompt, completion, temperature=1.0):
    """Log-probabilities of a completion by one uncached forward pass."""
    sequence = [*prompt, *completion]
    padded = sequence + [0] * (32 - len(sequence))  # causal: what follows changes nothing
    z = np.asarray(_full()(model()[1], jnp.array([padded])), np.float64) / temperature
    z = z[len(prompt) - 1 : len(sequence) - 1]
    return z[np.arange(len(completion)), completion] - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) - z.max(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_cached_decode_equals_the_full_forward_for_every_sampled_token(temperature):
    rollout = generate(temperature=temperature, slots=3, refill=2)
    assert len({len(c.ids) for c in rollout.completions} | {10}) >= 1
    for c in rollout.completions:
        np.testing.assert_allclose(c.logp, full_logp(PROMPTS[c.prompt], c.ids, temperature), atol=1e-4)
        np.testing.assert_allclose(c.raw_logp, full_logp(PROMPTS[c.prompt], c.ids), atol=1e-4)


@pytest.mark.parametrize("plan", [(4, 2), (3, 1), (7, 6)])
def test_slots_and_refill_size_change_nothing_but_the_schedule(plan):
    slots, refill = plan
    base, other = generate(), generate(slots=slots, refill=refill)
    assert ids(base) == ids(other)
    for a, b in zip(base.completions, other.completions, strict=True):
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
    assert sum(other.refills) == -(-10 // refill)


def same(a, b):
    assert ids(a) == ids(b)
    for x, y in zip(a.completions, b.completions, strict=True):
        assert x.stop is y.stop
        np.testing.assert_allclose(x.logp, y.logp, rtol=2e-6, atol=4e-6)
        np.testing.assert_allclose(x.raw_logp, y.raw_logp, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": (2, 3, 5)},
        {"drain": (10, 5, 2)},
        {"drain": (10, 6, 3), "chunks": (2, 3, 5)},
        {"piece": 3, "refill": 4},
        {"slots": 4, "refill": 2, "piece": 3, "prompt_rows": 4, "chunks": (10,), "drain": (4, 2)},
        {"slots": 3, "refill": 1, "prompt_rows": 3, "chunks": (10,), "drain": (3,), "unrolled": False},
    ],
    ids=["tiers", "drain", "drain_and_tiers", "pieces", "pieces_between_decode_steps", "scanned_layers"],
)
@pytest.mark.slow
def test_the_plan_changes_nothing_but_the_speed(change, monkeypatch):
    """Some sequences stop early, so that slots drain and are refilled at different times."""
    limits = {"limits": [1, 10, 3, 2, 5, 0, 9, 10, 4, 7], "stop_ids": tuple(range(0, 98, 9))}
    base = generate(**limits)
    plan = lambda *arguments: dataclasses.replace(engine_shape(*arguments), **change)
    monkeypatch.setattr("jaxrl_post.rollout.sampler.engine_shape", plan)
    same(base, generate(**limits))


@pytest.mark.parametrize("slots", [None, 4])
def test_replicas_in_lockstep_give_what_free_ones_give_in_equally_many_steps(slots):
    """Replica 0 has nothing but short requests, replica 3 padding alone."""
    limits = [1, 2, 1, 1, 10, 9, 1, 10, 4, 7]
    kw = {"devices": 4, "axes": EIGHT_DEVICES["four"], "limits": limits, "stop_ids": (), "slots": slots, "refill": 2}
    free, locked = generate(**kw), generate(**kw, lockstep=True)
    same(free, locked)
    assert len(set(free.decode_steps)) > 1
    assert len(locked.decode_steps) == 4
    assert len(set(locked.decode_steps)) == len(set(locked.refills)) == 1


def test_the_decode_loops_copy_no_chunk_of_the_cache():
    """XLA copies what it cannot prove safe to update in place: a cache of many GiB, at every token."""
    for unrolled in (True, False):
        options = SampleOptions(samples_per_prompt=2, max_new_tokens=10)
        requests = requests_of(options)
        shape = engine_shape(5, options, 8, requests.options, CONFIG, 1e9, "cpu" if unrolled else "gpu")
        shape = dataclasses.replace(shape, chunks=(3, 7), drain=(10,), attention="xla")
        program = make_rollout(model()[0], shape, mesh_of()).lower(model()[1], requests, None, np.int32(0))
        bodies = re.findall(r"^%[^\n]*region[^\n]*\{\n(.*?)^\}", program.compile().as_text(), re.S | re.M)
        decoding = [body for body in bodies if "dynamic-update-slice" in body or "dynamic_update_slice" in body]
        assert decoding
        chunks = (
            [f"10,2,{shape}" for shape in ("3,16", "7,16", "16,3", "16,7")]
            if unrolled
            else [f"{CONFIG.layers},10,2,10,16"]
        )
        for cache in (f"f32[{chunk}]" for chunk in chunks):
            assert cache in "".join(decoding)
            copies = [line for body in decoding for line in body.splitlines() if " copy(" in line and cache in line]
            assert copies == []


def test_slots_fit_the_memory_and_hold_whole_groups():
    options, sampling = SampleOptions(4, 20), Sampling(*np.ones((3, 80), np.float32))
    column = 2 * CONFIG.layers * 2 * 16 * 4
    fitting = lambda slots: engine_shape(20, options, 8, sampling, CONFIG, column * (8 + 1.5 * 20) * slots, "cpu")
    assert (fitting(100).slots, fitting(100).refill, fitting(100).chunks) == (80, 80, (20,))
    assert (fitting(50).slots, fitting(50).refill, fitting(50).prompt_rows) == (48, 12, 21)
    assert fitting(3).slots == 3
    assert fitting(0.1).slots == 1
    room = column * (8 + 1.5 * 20) * 48
    counting = lambda **penalty: engine_shape(20, options, 8, sampling._replace(**penalty), CONFIG, room, "cpu").slots
    slots_in = lambda of_counts: int(48 / (1 + of_counts * CONFIG.vocab_size / (column * 38))) // 4 * 4
    assert counting(presence=np.full(80, 0.5, np.float32)) == slots_in(2) < 48  # int16 counts
    assert counting(repetition=np.full(80, 1.5, np.float32)) == slots_in(3)  # and what is in the prompt


EIGHT_DEVICES = {
    "four": (("data", 4),),
    "data": (("data", 8),),
    "fsdp": (("fsdp", 8),),
    "fsdp_tensor": (("fsdp", 4), ("tensor", 2)),
    "data_expert_tensor": (("data", 2), ("expert", 2), ("tensor", 2)),
}


@pytest.mark.parametrize(
    ("temperature", "axes"),
    [(0.0, "data"), (0.0, "fsdp"), (0.0, "fsdp_tensor"), (1.0, "fsdp_tensor"), (1.0, "data_expert_tensor")],
)
def test_every_mesh_gives_the_same_ids(temperature, axes):
    one, eight = (generate(temperature=temperature, **kw) for kw in ({}, {"devices": 8, "axes": EIGHT_DEVICES[axes]}))
    assert ids(one) == ids(eight)


def test_collectives_of_the_decode_loop_stay_inside_a_tensor_group():
    """Replicas run at their own pace: a collective across them would wait for ever."""
    axes = EIGHT_DEVICES["fsdp_tensor"]
    generate(devices=8, axes=axes)
    who = sampler((96,), 8, **dict(axes))
    [program] = [f for (shape, _), f in who._compiled.items() if not shape.features.greedy]
    mesh = mesh_of(8, **dict(axes))
    requests = requests_of(SampleOptions(samples_per_prompt=2, max_new_tokens=10), replicas=4)
    params = place(model()[1], tree_shardings(abstract(CONFIG)[2], abstract(CONFIG)[1], ROLLOUT, mesh))
    text = program.lower(params, requests, None, np.int32(0)).compile().as_text()
    assert "collective-permute" not in text
    assert "all-to-all" not in text
    groups = set(re.findall(r"all-(?:reduce|gather)[^\n]*?replica_groups=(\S+?),(?: |$)", text))
    assert groups
    assert groups <= {"[4,2]<=[8]", "{{0,1},{2,3},{4,5},{6,7}}"}


def test_a_prompt_alone_gives_what_it_gives_in_a_batch():
    together = generate([PROMPTS[0], PROMPTS[1]], samples_per_prompt=1, temperature=0.0)
    for i in (0, 1):
        alone = generate([PROMPTS[i]], samples_per_prompt=1, temperature=0.0)
        assert ids(alone)[0] == ids(together)[i]
        np.testing.assert_allclose(alone.completions[0].raw_logp, together.completions[i].raw_logp, atol=1e-5)


def test_prompt_width_changes_nothing():
    assert ids(generate(width=8)) == ids(generate(width=19))


def test_what_stands_in_the_padding_of_prompts_changes_nothing(monkeypatch):
    """The widest case has pieces of nothing but padding, and a prompt of one token."""
    for width in (8, 19):
        clean = generate(width=width)

        def dirty(*arguments, **keys):
            made = padded_requests(*arguments, **keys)
            live = np.arange(made.tokens.shape[1]) < made.lengths[:, None]
            assert not live.all()
            return made._replace(tokens=np.where(live, made.tokens, 88).astype(np.int32))

        with monkeypatch.context() as patched:
            patched.setattr("jaxrl_post.rollout.sampler.padded_requests", dirty)
            same(clean, generate(width=width))


def test_an_earlier_call_leaves_no_trace():
    first = generate([PROMPTS[2]])
    generate(PROMPTS)
    again = generate([PROMPTS[2]])
    assert ids(first) == ids(again)
    for a, b in zip(first.completions, again.completions, strict=True):
        np.testing.assert_array_equal(a.logp, b.logp)


def test_several_stop_ids_end_a_row_and_stay_in_it():
    free = generate(stop_ids=(), temperature=0.0, samples_per_prompt=1)
    assert all(c.stop is StopReason.LENGTH and len(c.ids) == 10 for c in free.completions)
    stops = (int(free.completions[0].ids[2]), int(free.completions[2].ids[4]))
    stopped = generate(stop_ids=stops, temperature=0.0, samples_per_prompt=1)
    for a, b in zip(free.completions, stopped.completions, strict=True):
        hits = [i for i, token in enumerate(a.ids) if token in stops]
        expected = a.ids[: hits[0] + 1] if hits else a.ids
        assert b.ids.tolist() == expected.tolist()
        assert b.stop is (StopReason.STOP if hits else StopReason.LENGTH)
    assert stopped.completions[0].stop is StopReason.STOP


def test_a_stop_id_as_the_last_allowed_token_is_a_stop_and_own_limits_hold():
    free = generate(stop_ids=(), temperature=0.0, samples_per_prompt=1)
    stop = int(free.completions[0].ids[3])
    first = free.completions[0].ids.tolist().index(stop)
    limits = [first + 1, 4, 0, 10, 1]
    rollout = generate(stop_ids=(stop,), temperature=0.0, samples_per_prompt=1, limits=limits)
    assert rollout.completions[0].stop is StopReason.STOP
    for c, limit in zip(rollout.completions, limits, strict=True):
        assert len(c.ids) <= limit
        if c.stop is StopReason.LENGTH:
            assert len(c.ids) == limit


def test_seeds():
    hot = {"prompts": [PROMPTS[0]], "samples_per_prompt": 8, "max_new_tokens": 12}
    base = ids(generate(**hot))
    assert base == ids(generate(**hot))
    assert len({tuple(x) for x in base}) == 8
    assert base != ids(generate(**hot, step=1))
    assert base != ids(generate(**hot, seed=1))
    changed = ids(generate(**hot, seeds=[0, 0, 5, 0, 0, 0, 0, 0]))
    assert changed[2] != base[2]
    assert changed[:2] + changed[3:] == base[:2] + base[3:]
    cold = [ids(generate(**hot, temperature=0.0, seed=s, step=s)) for s in (0, 1)]
    assert cold[0] == cold[1]


def test_zero_new_tokens_and_zero_prompts():
    rollout = generate(max_new_tokens=0)
    assert [len(c.ids) for c in rollout.completions] == [0] * 10
    assert generate([]).completions == []


def test_bad_prompts_are_refused_by_name():
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        generate([[1], []])
    with pytest.raises(ValueError, match="prompt 0 has 9 tokens, the cache holds 8"):
        generate([[1] * 9], width=8)
    with pytest.raises(ValueError, match="2048 positions"):
        generate([[1] * 2045])
    with pytest.raises(ValueError, match=r"stop ids \[98\] are outside the vocabulary of 98"):
        sampler((98,))
    with pytest.raises(ValueError, match="multiple or a divisor"):
        generate(samples_per_prompt=4, slots=8, refill=3)


def test_top_k_and_top_p_restrict_what_is_drawn():
    rollout = generate(top_k=1, samples_per_prompt=1)
    assert ids(rollout) == ids(generate(temperature=0.0, samples_per_prompt=1))
    np.testing.assert_allclose(np.concatenate([c.logp for c in rollout.completions]), 0.0, atol=1e-6)


def test_one_prefill_for_each_prompt_when_a_group_fits_the_slots():
    options = SampleOptions(samples_per_prompt=4, max_new_tokens=5, slots=8)
    sampling = Sampling(np.ones(20, np.float32), np.zeros(20, np.int32), np.ones(20, np.float32))
    shape = engine_shape(5, options, 8, sampling, CONFIG, 1e9, "cpu")
    assert shape.prompts_per_refill * 4 == shape.refill
    rollout = generate(samples_per_prompt=4, slots=8)
    assert sum(rollout.refills) * shape.prompts_per_refill == 5


def test_slots_are_refilled_while_others_still_run():
    """With ragged lengths, continuous batching takes fewer decode steps than waves of static batches."""
    limits = [1, 10, 1, 10, 1, 1, 1, 1, 10, 1]
    kw = {"samples_per_prompt": 2, "stop_ids": (), "limits": limits}
    continuous, static = generate(slots=4, refill=2, **kw), generate(slots=4, refill=4, **kw)
    assert ids(continuous) == ids(static)
    assert sum(continuous.decode_steps) < sum(static.decode_steps)


def test_compiles_once_for_each_shape_and_logs_its_plan(caplog):
    caplog.set_level(logging.INFO, "jaxrl_post.rollout.sampler")
    who = Sampler(model()[0], CONFIG, mesh_of(), (96,))
    options = SampleOptions(samples_per_prompt=1, max_new_tokens=4)
    params = model()[1]
    for _ in range(2):
        for n in range(1, 34):
            who.generate(params, [list(range(1, n + 1))], options, seed=0, step=n)
    assert sorted(shape.width for shape, _ in who._compiled) == [8, 16, 32, 64]
    assert all(f._cache_size() == 1 for f in who._compiled.values())
    plan = "rollout of 1 prompts a replica: 1 slots, 1 filled at once, prompts in pieces of"
    assert [message.startswith(plan) for message in caplog.messages] == [True] * 4


def test_features_are_static():
    sampling = Sampling(np.ones(2, np.float32), np.zeros(2, np.int32), np.ones(2, np.float32))
    shape = engine_shape(1, SampleOptions(samples_per_prompt=2), 8, sampling, CONFIG, 1e9, "cpu")
    assert hash(shape) == hash(dataclasses.replace(shape))
    assert not any(dataclasses.astuple(shape.features))
