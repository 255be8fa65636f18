"""One update gives the same numbers however it is split, packed and placed; then on-policy and bookkeeping facts."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_training import FAST_COMPILE, TEMPERATURE, Trainer, assert_trees_close, tiny_params, trajectories

from jaxrl_post.training.packing import PackShape, pack
from jaxrl_post.training.update import make_score
from jaxrl_post.types import TrainBatch, Trajectory
from sharding import make_mesh

GRAPHDEF, PARAMS = tiny_params()
SHAPE = PackShape(rows=1, length=96, targets=96, micro_batches=4)


WIDTH = 96


def sequence_logprobs(params, prompt, response):
    """One unpacked sequence, whole logits; float32 [len(response)]."""
    logp = _row_logprobs(params, *_padded(prompt, response))
    return logp[len(prompt) - 1 : len(prompt) - 1 + len(response)]


def _padded(prompt, response):
    ids = np.zeros((1, WIDTH), np.int32)
    ids[0, : len(prompt) + len(response)] = (*prompt, *response)
    return ids, (np.arange(WIDTH) < len(prompt) + len(response)).astype(np.int32)[None]


@jax.jit
def _row_logprobs(params, ids, live):
    decoder = nnx.merge(GRAPHDEF, params)
    positions = jnp.arange(WIDTH, dtype=jnp.int32)[None]
    logits = decoder.logits(decoder.hidden(ids, positions, live, jnp.zeros_like(live)))
    logp = jax.nn.log_softmax(logits[0] / TEMPERATURE)
    return jnp.take_along_axis(logp[:-1], ids[0, 1:, None], axis=-1)[:, 0]


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
@jax.value_and_grad
def _sequence_loss(params, ids, live, old, weight, advantage):
    """Weight 0 outside the response."""
    ratio = jnp.exp(_row_logprobs(params, ids, live) - old)
    return (weight * jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 0.8, 1.2))).sum()


def reference(samples):
    """Loss and parameters after SGD with rate 1, one sequence at a time and the formula written out."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    tokens = sum(len(t.response_ids) for t in samples if t.train)
    loss, grads = 0.0, jax.tree.map(jnp.zeros_like, params)
    for t in samples:
        response = slice(len(t.prompt_ids) - 1, len(t.prompt_ids) - 1 + len(t.response_ids))
        old, weight = np.zeros((2, WIDTH - 1), np.float32)
        old[response], weight[response] = t.logp, t.train / tokens
        part, grad = _sequence_loss(params, *_padded(t.prompt_ids, t.response_ids), old, weight, t.advantage)
        loss, grads = loss + float(part), jax.tree.map(jnp.add, grads, grad)
    return loss, jax.tree.map(jnp.subtract, params, grads)


def uneven():
    """Responses of 3, 17, 5 and 64 tokens to different prompts."""
    rng = np.random.default_rng(3)
    draw = lambda n: rng.integers(0, 32, n).astype(np.int32)
    logp = lambda n: rng.normal(-3.5, 0.3, n).astype(np.float32)
    return [
        Trajectory(g, tuple(map(int, draw(4 + g))), draw(n), logp(n), 0.3 - 0.2 * g)
        for g, n in enumerate([3, 17, 5, 64])
    ]


@functools.lru_cache
def trainer(rows=SHAPE.rows, micro_batches=SHAPE.micro_batches, sizes=(), devices=1, length=96):
    mesh = make_mesh(dict(sizes), jax.devices()[:devices])
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    return Trainer(PackShape(rows, length, length, micro_batches, shards), mesh)


@functools.lru_cache
def expected(kind):
    return reference({"uneven": uneven, "groups": trajectories}[kind]())


def one_row_each(samples, axis):
    """A batch with every sequence in its own micro-batch (axis 0) or its own row (axis 1)."""
    single = PackShape(rows=1, length=96, targets=96, micro_batches=1)
    rows = [pack([t], single, aggregation="token-sum")[0] for t in samples]
    batch = TrainBatch(*(np.concatenate(fields, axis=axis) for fields in zip(*rows, strict=True)))
    return batch._replace(weight=batch.weight / batch.mask.sum(dtype=np.float32))


@pytest.mark.parametrize("split", ["four micro-batches", "two packed micro-batches", "one of four rows"])
def test_accumulation_does_not_change_loss_or_step(split):
    t, samples = trainer(), uneven()
    if split == "four micro-batches":
        batch, n_micro = one_row_each(samples, axis=0), 4
    elif split == "two packed micro-batches":
        batch, n_micro, _ = pack(samples, SHAPE, aggregation="token-mean")
        assert n_micro == 2
    else:
        t, batch, n_micro = trainer(4, 1), one_row_each(samples, axis=1), 1
    state, metrics = t.update(t.state(PARAMS), batch, n_micro)
    loss, params_after = expected("uneven")
    np.testing.assert_allclose(metrics["actor/pg_loss"], loss, rtol=1e-5)
    assert_trees_close(state.params, params_after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share_prefix", [True, False])
def test_sharing_the_prompt_does_not_change_loss_or_step(share_prefix):
    params, metrics = trainer().step(PARAMS, trajectories(), share_prefix=share_prefix)
    loss, params_after = expected("groups")
    np.testing.assert_allclose(metrics["actor/pg_loss"], loss, rtol=1e-5)
    assert_trees_close(params, params_after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "sizes", [{"data": 8}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"sequence": 2}], ids=lambda s: "-".join(s)
)
def test_the_mesh_does_not_change_loss_or_step(sizes):
    devices = int(np.prod(list(sizes.values())))
    on_mesh = trainer(8, 2, tuple(sizes.items()), devices, length=32)
    params, metrics = on_mesh.step(PARAMS, trajectories())
    loss, params_after = expected("groups")
    np.testing.assert_allclose(metrics["actor/pg_loss"], loss, rtol=1e-5)
    assert_trees_close(params, params_after, rtol=1e-5, atol=1e-6)


def test_fsdp_gathers_weights_and_never_the_rows():
    """8 rows of 32 positions on 8 devices: a device holds one row, and gathers e.g. the table [32, 16]."""
    text = trainer(8, 2, (("fsdp", 8),), 8, length=32).program.as_text()
    assert "f32[1,32,16]" in text
    assert "f32[8,32," not in text
    assert re.search(r"= f32\[32,16\]\S* all-gather", text)


@functools.lru_cache
def scorer():
    t = trainer()
    return make_score(
        t.graphdef,
        temperature=TEMPERATURE,
        chunk=5,
        params_shardings=t.shardings.params,
        batch_shardings=t.batch_shardings,
    )


def test_scores_are_the_log_probs_of_separate_sequences():
    samples = trajectories(seed=5)
    batch, n_micro, _ = pack(samples, SHAPE, aggregation="token-mean", keep_all=True)
    scores = np.asarray(scorer()(trainer().state(PARAMS).params, batch, n_micro))
    assert not scores[~batch.mask].any()
    by_recorded = dict(zip(batch.rollout_logp[batch.mask].tolist(), scores[batch.mask], strict=True))
    for t in samples:
        if t.train and len(t.response_ids):
            alone = sequence_logprobs(PARAMS, t.prompt_ids, t.response_ids)
            np.testing.assert_allclose([by_recorded[x] for x in t.logp.tolist()], alone, rtol=1e-5, atol=1e-5)


def on_policy(params, samples):
    """The samples with the policy's own log-probs as recorded ones, and advantages for a step of moderate size."""
    recorded = [np.asarray(sequence_logprobs(params, t.prompt_ids, t.response_ids)) for t in samples]
    return [
        Trajectory(t.group, t.prompt_ids, t.response_ids, logp, 0.1 * t.advantage, t.train)
        for t, logp in zip(samples, recorded, strict=True)
    ]


def test_two_epochs_of_two_mini_batches_start_at_ratio_one_and_leave_it():
    t = trainer()
    samples = on_policy(PARAMS, trajectories(seed=7, groups=4))
    halves = [pack([s for s in samples if s.group % 2 == half], SHAPE, aggregation="token-mean") for half in (0, 1)]
    stored = [batch.old_logp.copy() for batch, _, _ in halves]
    state, seen = t.state(PARAMS), []
    for batch, n_micro, _ in halves * 2:
        before = np.asarray(scorer()(state.params, batch, n_micro))
        state, metrics, logp = t.update_and_logp(state, batch, n_micro)
        np.testing.assert_allclose(logp, before, atol=1e-6)
        seen.append(jax.device_get(metrics))
        ppo_kl = (batch.old_logp - before)[batch.mask].mean()
        np.testing.assert_allclose(seen[-1]["actor/ppo_kl"], ppo_kl, rtol=1e-3, atol=1e-5)
    first_batch = halves[0][0]
    assert abs(seen[0]["rollout_corr/logp_abs_diff_max"]) < 1e-5
    np.testing.assert_allclose(
        seen[0]["actor/pg_loss"], -(first_batch.weight * first_batch.advantage).sum(), rtol=1e-4, atol=1e-6
    )
    assert seen[0]["actor/grad_norm"] > 1e-2
    assert all(m["rollout_corr/logp_abs_diff_max"] > 1e-2 for m in seen[1:])
    for (batch, _, _), old in zip(halves, stored, strict=True):
        np.testing.assert_array_equal(batch.old_logp, old)
    assert int(state.step) == 4


def test_one_program_takes_all_data_and_gives_up_the_old_state():
    """The compiled program refuses any other shape, dtype or sharding, so nothing here may need a second one."""
    t = trainer()
    state = t.state(PARAMS)
    for seed in range(3):
        batch, n_micro, _ = pack(trajectories(seed, groups=1 + seed), SHAPE, aggregation="token-mean")
        donated = state
        state, _ = t.update(state, batch, n_micro)
        assert donated.params["embed"].is_deleted()
    assert int(state.step) == 3


def test_without_signal_nothing_moves_and_garbage_gradients_are_refused():
    t = trainer()
    samples = trajectories()
    batch, n_micro, _ = pack(samples, SHAPE, aggregation="token-mean")
    params, metrics = jax.device_get(t.update(t.state(PARAMS), batch, 0))
    assert_trees_close(params.params, PARAMS, rtol=0)
    assert (metrics["actor/pg_loss"], metrics["actor/skipped_update"], int(params.step)) == (0, 0, 1)
    poisoned = batch._replace(advantage=np.where(batch.mask, np.nan, 0).astype(np.float32))
    params, metrics = jax.device_get(t.update(t.state(PARAMS), poisoned, n_micro))
    assert_trees_close(params.params, PARAMS, rtol=0)
    assert metrics["actor/skipped_update"] == 1
    assert not np.isfinite(metrics["actor/grad_norm"])


def test_rows_that_do_not_divide_the_mesh_are_refused_by_name():
    with pytest.raises(ValueError, match=r"tokens.*size 3 .*data=2"):
        Trainer(PackShape(3, 32, 32, 1), make_mesh({"data": 2}))
