"""One offline update gives the numbers of the formula on separate sequences, however it is split, packed and placed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_offline import TINY, Trainer, alone, answer, assert_trees_close, draw, row_logprobs, tiny_params

from jaxrl_post import config_offline as kinds
from jaxrl_post.models import scalar_head
from jaxrl_post.training.log_ratios import mean_ratio, reference_point
from jaxrl_post.training.offline_packing import example_shape, pack_examples
from jaxrl_post.types_offline import Example

PARAMS, REFERENCE = tiny_params(0), tiny_params(1)
SFT, DPO = kinds.SFT(kind="sft"), kinds.DPO(kind="dpo")
SINGLES = draw([(3,), (17,), (5,), (60,)], seed=3)
PAIRS = draw([(3, 5), (10, 2), (1, 12), (6, 6)], seed=4)


@functools.lru_cache
def trainer(algorithm_kind="sft", budget=96, length=96, examples=4, mesh=()):
    algorithm = {"sft": SFT, "dpo": DPO}[algorithm_kind]
    used = SINGLES if algorithm_kind == "sft" else PAIRS
    sizes = [e.size for e in used]
    return Trainer(algorithm, sizes, len(used[0].answers), examples=examples, budget=budget, length=length, mesh=mesh)


def padded(example, k=0):
    """ids [1, 96], live and learned of one sequence; learned [95] says which predictions count."""
    ids = (*example.prompt_ids, *example.answers[k].ids)
    row = np.zeros((1, 96), np.int32)
    row[0, : len(ids)] = ids
    learned = np.zeros(95, bool)
    at = len(example.prompt_ids) - 1
    learned[at : at + len(example.answers[k].ids)] = example.answers[k].trained
    return row, (np.arange(96) < len(ids)).astype(np.int32)[None], learned


@jax.jit
@jax.value_and_grad
def _sequence_nll(params, row, live, learned):
    return -jnp.sum(jnp.where(learned, row_logprobs(params, row, live), 0.0))


@functools.lru_cache
def sft_reference():
    """Loss and parameters after SGD with rate 1: Σ NLL over all tokens ÷ their number."""
    count = sum(e.answers[0].length for e in SINGLES)
    made = [_sequence_nll(PARAMS, *padded(e)) for e in SINGLES]
    loss = sum(float(x) for x, _ in made) / count
    grads = jax.tree.map(lambda *g: sum(map(np.asarray, g)) / count, *[g for _, g in made])
    return loss, jax.tree.map(np.subtract, PARAMS, grads)


@functools.lru_cache
def dpo_reference():
    """The same for DPO with β = 0.1; the gradient by the chain rule on separate sequences."""
    loss, grads = 0.0, jax.tree.map(np.zeros_like, PARAMS)
    for e in PAIRS:
        sums = {(p, k): alone(w, e.prompt_ids, e.answers[k]).sum() for k in (0, 1) for p, w in WEIGHTS.items()}
        h = sums["policy", 0] - sums["reference", 0] - sums["policy", 1] + sums["reference", 1]
        loss += np.log1p(np.exp(-0.1 * h)) / len(PAIRS)
        slope = -0.1 / (1 + np.exp(0.1 * h)) / len(PAIRS)  # d loss / d h
        for k, sign in ((0, -1), (1, 1)):  # the NLL's gradient is minus that of log p
            _, nll_grad = _sequence_nll(PARAMS, *padded(e, k))
            grads = jax.tree.map(lambda g, n, s=sign * slope: g + s * np.asarray(n), grads, nll_grad)
    return loss, jax.tree.map(np.subtract, PARAMS, grads)


WEIGHTS = {"policy": PARAMS, "reference": REFERENCE}
SPLITS = {
    "one row at a time": {"budget": 96, "length": 96},
    "all rows at once": {"budget": 384, "length": 96},
    "fsdp": {"budget": 96, "length": 96, "mesh": (("fsdp", 4),)},
    "data and tensor": {"budget": 96, "length": 96, "mesh": (("data", 2), ("tensor", 2))},
}


@pytest.mark.parametrize("split", SPLITS)
def test_sft_is_the_mean_over_all_tokens_however_split(split):
    params, metrics, n_micro = trainer("sft", **SPLITS[split]).step(PARAMS, SINGLES)
    loss, after = sft_reference()
    if split == "one row at a time":
        assert n_micro > 1
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_trees_close(params, after, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("split", {**SPLITS, "one row at a time": {"budget": 32, "length": 32}})
def test_dpo_is_the_mean_over_all_pairs_however_split(split):
    options = {**SPLITS, "one row at a time": {"budget": 32, "length": 32}}[split]
    params, metrics, n_micro = trainer("dpo", **options).step(PARAMS, PAIRS, REFERENCE)
    loss, after = dpo_reference()
    if split == "one row at a time":
        assert n_micro > 1
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_trees_close(params, after, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("budget", [32, 384])
def test_a_policy_that_is_the_reference_loses_exactly_ln_2(count, budget):
    _, metrics, _ = trainer("dpo", budget=budget, length=min(budget, 96)).step(PARAMS, PAIRS[:count], PARAMS)
    np.testing.assert_allclose(metrics["loss"], np.log(2), rtol=0, atol=1e-7)
    assert metrics["rewards/margins"] == 0
    assert metrics["rewards/accuracies"] == 0


def test_aggregation_by_sequence_weighs_sequences_alike():
    _, metrics, _ = trainer("sft").step(PARAMS, SINGLES, aggregation="seq-mean-token-mean")
    means = [-alone(PARAMS, e.prompt_ids, e.answers[0]).mean() for e in SINGLES]
    np.testing.assert_allclose(metrics["loss"], np.mean(means), rtol=1e-5)


def test_what_a_user_says_later_is_context_and_no_target():
    first, second = answer([1, 2, 3, 4, 5], [True, True, False, False, True]), SINGLES[0].answers[0]
    examples = [Example((7, 8), (first,)), Example((9,), (second,))]
    _, metrics, _ = trainer("sft").step(PARAMS, examples)
    logp = np.concatenate([alone(PARAMS, (7, 8), first), alone(PARAMS, (9,), second)])
    assert len(logp) == 6
    np.testing.assert_allclose(metrics["loss"], -logp.mean(), rtol=1e-5)


def test_targets_come_from_lengths_not_from_the_padding_id():
    """Padding is 0; answers that end in 0, and hold it, keep every token."""
    examples = [Example((5, 6, 7), (answer([8, 9, 0]),)), Example((5, 6, 7), (answer([8, 0, 9, 0]),))]
    shape = example_shape([6, 7], 1, examples_per_step=2, tokens_per_microbatch=32)
    batch, _, _ = pack_examples(examples, shape)
    rows = batch.rows
    targets = [rows.target[rows.mask & (rows.sequence == s)].tolist() for s in (0, 1)]
    assert sorted(targets, key=len) == [[8, 9, 0], [8, 0, 9, 0]]
    _, metrics, _ = trainer("sft").step(PARAMS, examples)
    logp = np.concatenate([alone(PARAMS, e.prompt_ids, e.answers[0]) for e in examples])
    np.testing.assert_allclose(metrics["loss"], -logp.mean(), rtol=1e-5)


def test_both_sides_of_a_pair_are_neighbours_in_one_row():
    examples = draw([(2, 3), (4, 1), (1, 1), (3, 3), (2, 2)], seed=9, prompts=(3,))
    shape = example_shape([e.size for e in examples], 2, examples_per_step=5, tokens_per_microbatch=24, row_length=12)
    batch, n_micro, report = pack_examples(examples, shape)
    found = []
    for a, b in np.ndindex(batch.rows.target.shape[:2]):
        row, mask = jax.tree.map(lambda x, a=a, b=b: x[a, b], batch), batch.rows.mask[a, b]
        for e in range(int((row.examples.weight > 0).sum())):
            sides = [row.rows.target[mask & (row.rows.sequence == 2 * e + k)].tolist() for k in (0, 1)]
            assert [row.rows.tokens[row.examples.last[2 * e + k]] for k in (0, 1)] == [side[-1] for side in sides]
            found.append(tuple(map(tuple, sides)))
    assert sorted(found) == sorted(tuple(answer.ids for answer in e.answers) for e in examples)
    assert n_micro == 2
    np.testing.assert_allclose(batch.examples.weight.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(batch.rows.weight.sum(), 1, rtol=1e-6)
    assert (report.sequences, report.targets) == (10, sum(len(a.ids) for e in examples for a in e.answers))


def test_shapes_hold_any_draw_of_examples():
    rng = np.random.default_rng(0)
    for _ in range(60):
        pool = draw([tuple(rng.integers(1, 9, 2)) for _ in range(9)], seed=int(rng.integers(99)))
        budget = int(rng.choice([32, 40, 64, 128]))
        shape = example_shape([e.size for e in pool], 2, examples_per_step=6, tokens_per_microbatch=budget)
        picked = [pool[i] for i in rng.integers(0, 9, 6)]
        batch, _, _ = pack_examples(picked, shape)
        assert int((batch.examples.weight > 0).sum()) == 6


def test_ranks_get_the_tokens_that_the_report_tells_of():
    shape = example_shape([e.size for e in PAIRS], 2, examples_per_step=len(PAIRS), tokens_per_microbatch=96,
                          row_length=96, batch_shards=2)  # fmt: skip
    batch, n_micro, report = pack_examples(PAIRS, shape)
    live = np.count_nonzero(batch.rows.segments, axis=-1).reshape(n_micro, 2, -1)
    assert report.dealt == tuple(live.sum((0, 2)).tolist())
    assert sum(report.undealt) == sum(report.dealt) == sum(e.size for e in PAIRS)


def test_an_example_longer_than_a_row_names_the_keys():
    with pytest.raises(ValueError, match=r"takes 50 positions.*tokens_per_microbatch=32.*data\.max_tokens"):
        example_shape([50, 3], 2, examples_per_step=2, tokens_per_microbatch=32)


def test_constants_of_the_whole_update():
    """KTO's point and BCO's mean ratio from token log-probs scattered over rows and micro-batches."""
    rng = np.random.default_rng(2)
    shape = example_shape([e.size for e in PAIRS], 2, examples_per_step=4, tokens_per_microbatch=32)
    batch, _, _ = pack_examples(PAIRS, shape)
    logp, ref = (rng.normal(1, 1, batch.rows.target.shape).astype(np.float32) for _ in range(2))
    batch = batch._replace(rows=batch.rows._replace(ref_logp=ref))
    gap = ((logp.astype(np.float64) - ref) * batch.rows.mask).sum()
    np.testing.assert_allclose(mean_ratio(logp, batch), gap / 8, rtol=1e-5)
    np.testing.assert_allclose(reference_point(logp, batch), max(gap / 8, 0), rtol=1e-5)
    np.testing.assert_allclose(reference_point(-logp, batch._replace(rows=batch.rows._replace(ref_logp=-ref))),
                               max(-gap / 8, 0), rtol=1e-5)  # fmt: skip
    assert gap != 0


def test_a_score_is_the_dot_product_with_the_head():
    head = scalar_head.init_head(TINY, jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(2, 3, TINY.hidden_size)).astype(np.float32)
    np.testing.assert_allclose(scalar_head.scores(head, x), x @ np.asarray(head["weight"]), rtol=1e-5)
