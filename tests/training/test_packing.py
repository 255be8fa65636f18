"""Packing as a pure function: every token once, in its place, with its weight; shapes that no data can exceed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.objectives.reductions import token_weights
from jaxrl_post.training.balance import in_order, places, seqlen_metrics
from jaxrl_post.training.packing import PackShape, best_fit, empty_batch, pack, pack_shape
from jaxrl_post.types import TrainBatch, Trajectory

MAX_PROMPT, MAX_NEW, GROUP, PROMPTS = 5, 7, 3, 4


def trajectory(group, prompt, response, advantage=1.0, train=True, first_logp=0):
    """Log-probs number the tokens of a test, so that every target can be told from every other."""
    logp = np.arange(first_logp, first_logp + len(response), dtype=np.float32)
    return Trajectory(group, tuple(prompt), np.array(response, np.int32), logp, advantage, train)


@st.composite
def updates(draw):
    out, tokens = [], 0
    for group in range(draw(st.integers(0, PROMPTS))):
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=MAX_PROMPT))
        for _ in range(GROUP):
            response = draw(st.lists(st.integers(0, 9), max_size=MAX_NEW))
            advantage = draw(st.sampled_from([-1.5, 0.0, 0.5]))
            out.append(trajectory(group, prompt, response, advantage, draw(st.booleans()), tokens))
            tokens += len(response)
    return out


def shapes():
    options = {"max_prompt": MAX_PROMPT, "max_new_tokens": MAX_NEW, "samples_per_prompt": GROUP, "prompts": PROMPTS}
    return st.builds(
        lambda **choice: (pack_shape(**options, **choice), choice["share_prefix"]),
        tokens_per_microbatch=st.sampled_from([26, 40, 64]),
        row_length=st.sampled_from([None, 12, 19, 26]),
        share_prefix=st.booleans(),
        batch_shards=st.sampled_from([1, 2]),
    )


def seen_by(row: TrainBatch, column: int) -> list[int]:
    """Columns that the attention rule lets a column see, in order."""
    segment, branch = row.segments, row.branches
    return [c for c in range(column + 1) if segment[c] == segment[column] > 0 and branch[c] in (0, branch[column])]


@settings(max_examples=150, deadline=None)
@given(updates(), shapes(), st.sampled_from(["token-mean", "seq-mean-token-mean"]), st.booleans())
def test_each_token_is_once_a_target_predicted_from_its_own_context(samples, shape_share, aggregation, keep_all):
    shape, share_prefix = shape_share
    batch, n_micro, report = pack(samples, shape, aggregation=aggregation, share_prefix=share_prefix, keep_all=keep_all)
    weights = token_weights(
        np.array([len(t.response_ids) * t.train for t in samples], dtype=int).reshape(-1), aggregation
    )
    wanted = {
        int(logp): (t.prompt_ids, tuple(t.response_ids[: j + 1]), t.advantage, weights[i])
        for i, t in enumerate(samples)
        if t.train and (keep_all or t.advantage)
        for j, logp in enumerate(t.logp)
    }
    for a, b, m in zip(*np.nonzero(batch.mask), strict=True):
        assert a < n_micro
        row = TrainBatch(*(field[a, b] for field in batch))
        prompt, response, advantage, weight = wanted.pop(int(row.rollout_logp[m]))
        context = seen_by(row, int(row.source[m]))
        assert tuple(row.tokens[context]) == (*prompt, *response[:-1])
        assert list(row.positions[context]) == list(range(len(context)))
        assert row.target[m] == response[-1]
        assert row.advantage[m] == np.float32(advantage)
        assert row.weight[m] == weight
        assert row.old_logp[m] == row.rollout_logp[m]
    assert not wanted
    assert report.targets == batch.mask.sum()
    assert not batch.weight[~batch.mask].any()
    live_first = np.sort(batch.mask, axis=-1)[..., ::-1]
    np.testing.assert_array_equal(batch.mask, live_first)
    assert [bool(rows.any()) for rows in batch.mask.any(-1)] == [a < n_micro for a in range(shape.micro_batches)]


@given(shapes(), st.data())
@settings(max_examples=150, deadline=None)
def test_full_length_samples_always_fit_the_planned_shape(shape_share, data):
    shape, share_prefix = shape_share
    length = st.sampled_from([1, MAX_NEW - 1, MAX_NEW])
    samples = [
        trajectory(g, [1] * prompt, [2] * n)
        for g in range(PROMPTS)
        for prompt in [data.draw(st.sampled_from([1, MAX_PROMPT - 1, MAX_PROMPT]))]
        for n in data.draw(st.lists(length, min_size=GROUP, max_size=GROUP))
    ]
    _, n_micro, _ = pack(samples, shape, aggregation="token-mean", share_prefix=share_prefix)
    assert 1 <= n_micro <= shape.micro_batches


@given(st.lists(st.integers(1, 10), max_size=30))
def test_best_fit_wastes_at_most_what_any_fit_may(sizes):
    bins = best_fit(sizes, 10)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    loads = sorted(sum(sizes[i] for i in b) for b in bins)
    assert all(load <= 10 for load in loads)
    assert len(loads) < 2 or loads[0] + loads[1] > 10


def test_a_group_shares_one_prompt_and_rows_hold_prompt_and_inputs():
    shape = PackShape(rows=1, length=16, targets=16, micro_batches=1)
    samples = [trajectory(0, [5, 6, 7], [8, 9, 2]), trajectory(0, [5, 6, 7], [8, 2, 9, 2], -1.0, first_logp=3)]
    batch, n_micro, report = pack(samples, shape, aggregation="token-mean")
    assert (n_micro, report.rows, report.sequences) == (1, 1, 2)
    np.testing.assert_array_equal(batch.tokens[0, 0, :9], [5, 6, 7, 8, 2, 9, 8, 9, 0])
    np.testing.assert_array_equal(batch.positions[0, 0, :9], [0, 1, 2, 3, 4, 5, 3, 4, 0])
    np.testing.assert_array_equal(batch.segments[0, 0, :9], [1] * 8 + [0])
    np.testing.assert_array_equal(batch.branches[0, 0, :9], [0, 0, 0, 1, 1, 1, 2, 2, 0])
    np.testing.assert_array_equal(batch.source[0, 0, :7], [2, 3, 4, 5, 2, 6, 7])
    np.testing.assert_array_equal(batch.sequence[0, 0, :7], [0, 0, 0, 0, 1, 1, 1])


def test_targets_come_from_lengths_so_an_end_token_equal_to_padding_stays_a_target():
    """End and padding ids are both 2, and both occur inside an answer."""
    shape = PackShape(rows=1, length=10, targets=10, micro_batches=2)
    samples = [trajectory(0, [5, 6, 7], [8, 9, 2]), trajectory(1, [5, 6, 7], [8, 2, 9, 2])]
    batch, _, _ = pack(samples, shape, aggregation="token-mean")
    targets = sorted(tuple(row.target[row.mask]) for row in map(TrainBatch._make, _rows(batch)) if row.mask.any())
    assert targets == [(8, 2, 9, 2), (8, 9, 2)]
    np.testing.assert_allclose(batch.weight[batch.mask], 1 / 7, rtol=1e-6)


def _rows(batch):
    return (tuple(field[a, b] for field in batch) for a in range(len(batch.mask)) for b in range(batch.mask.shape[1]))


def test_groups_without_signal_cost_no_rows_but_count_in_the_denominator():
    shape = PackShape(rows=1, length=12, targets=12, micro_batches=4)
    flat = [trajectory(g, [1, 2], [3] * 5, advantage=0.0) for g in range(3)]
    taught = trajectory(9, [1, 2], [4, 5, 6], advantage=2.0)
    batch, n_micro, report = pack([*flat, taught], shape, aggregation="token-mean")
    assert (n_micro, report.sequences, report.left_out) == (1, 1, 3)
    np.testing.assert_allclose(batch.weight[batch.mask], 1 / 18, rtol=1e-6)
    assert pack([*flat, taught], shape, aggregation="token-mean", keep_all=True)[1] == 3  # 7+5, 7, 7 tokens
    assert pack(flat, shape, aggregation="token-mean")[1] == 0


def test_untrained_and_empty_responses_leave_numerator_and_denominator():
    shape = PackShape(rows=1, length=12, targets=12, micro_batches=2)
    cut = trajectory(0, [1], [7] * 6, train=False)
    empty = trajectory(0, [1], [])
    batch, _, report = pack([cut, empty, trajectory(0, [1], [4, 5])], shape, aggregation="seq-mean-token-mean")
    np.testing.assert_allclose(batch.weight[batch.mask], [0.5, 0.5])
    assert (report.sequences, report.targets) == (1, 2)


def test_rows_are_dealt_evenly_to_the_shards():
    shape = PackShape(rows=4, length=12, targets=12, micro_batches=1, batch_shards=2)
    samples = [trajectory(g, [1], [3] * n) for g, n in enumerate([10, 9, 8, 7])]
    batch, _, _ = pack(samples, shape, aggregation="token-mean")
    per_row = batch.mask[0].sum(-1)
    np.testing.assert_array_equal(per_row.reshape(2, 2).sum(1), [17, 17])


def test_ranks_have_about_as_many_tokens_and_the_report_says_how_many_by_hand():
    shape = PackShape(rows=4, length=12, targets=12, micro_batches=2, batch_shards=2)
    samples = [trajectory(g, [1], [3] * (n - 1)) for g, n in enumerate([5, 12, 10, 3, 7, 6, 9, 4])]
    batch, n_micro, report = pack(samples, shape, aggregation="token-mean")
    # Rows of 12, 10, 9+3, 7+5 and 6+4 tokens; in the samples' order 7+5, 12, 10 | 9+3, 6+4. By targets the first
    # micro-batch has the 12s and 10, which make 24 and 22; the last 10 goes to the rank with 22.
    assert (n_micro, report.rows, report.undealt, report.dealt) == (2, 5, (34, 22), (24, 32))
    sequences = np.where(batch.mask, batch.sequence + 1, 0).max(-1)  # the last token of each is no position
    tokens = np.count_nonzero(batch.segments, axis=-1) + sequences
    assert tokens.reshape(2, 2, 2).sum((0, 2)).tolist() == [24, 32]


def test_balance_lowers_the_largest_difference_by_hand():
    tokens = [50, 40, 30, 20, 10, 6]
    assert in_order(tokens, 2) == (120, 36)
    placed = places(targets=tokens, tokens=tokens, rows=6, shards=2)
    # 50 | 40, 30 to the 40, 20 to the 50; of 70 and 70 the first gets the 10, and has no room for the 6.
    dealt = tuple(sum(tokens[i] for i, (_, row) in enumerate(placed) if row // 3 == rank) for rank in (0, 1))
    assert dealt == (80, 76)
    assert seqlen_metrics([(120, 36), (10, 20)], [dealt, (15, 15)]) == {
        "global_seqlen/min": 56, "global_seqlen/max": 130, "global_seqlen/minmax_diff": 74,
        "global_seqlen/balanced_min": 91, "global_seqlen/balanced_max": 95, "global_seqlen/mean": 93,
    }  # fmt: skip


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=40), st.sampled_from([1, 2, 4]))
@settings(max_examples=50, deadline=None)
def test_every_row_has_a_place_of_its_own_beside_rows_with_as_many_targets(rows, shards):
    targets, tokens = [target for target, _ in rows], [target + prompt for target, prompt in rows]
    placed = places(targets, tokens, 3 * shards, shards)
    assert len(set(placed)) == len(rows)
    assert {row for _, row in placed} <= set(range(3 * shards))
    by_micro = [sorted(targets[i] for i, (a, _) in enumerate(placed) if a == micro) for micro in range(len(rows))]
    full, rest = divmod(len(rows), 3 * shards)
    assert [len(part) for part in by_micro[: full + 1]] == [3 * shards] * full + [rest]
    assert [n for part in reversed(by_micro) for n in part] == sorted(targets)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, PackShape(1, 576, 576, 8)),  # whole group: 64 + 8·64 = 576; 1024 tokens hold one row
        ({"tokens_per_microbatch": 4096}, PackShape(4, 576, 576, 2)),  # 7 fit, but 8 rows are two halves
        ({"share_prefix": False}, PackShape(8, 128, 128, 8)),
        ({"row_length": 320}, PackShape(3, 320, 320, 6)),  # 4 samples a row, 2 rows a group
        # A whole group is too long for a row: 3 rows of 3 samples take 2496 positions, 4 of 2 take 2304, 8 of 1 2560.
        ({"max_new_tokens": 256}, PackShape(1, 576, 576, 32)),
        # Attention costs as much as the rest at 50 positions: 8 rows of 128 (8·128·3.56) beat 4 of 192 (4·192·4.84).
        ({"attention_length": 50.0}, PackShape(8, 128, 128, 8)),
        ({"tokens_per_microbatch": 130, "share_prefix": False}, PackShape(1, 128, 128, 64)),
        ({"max_prompt": 66, "tokens_per_microbatch": 135, "share_prefix": False}, PackShape(1, 135, 135, 64)),
        ({"tokens_per_microbatch": 4096, "batch_shards": 4}, PackShape(8, 576, 576, 1, 4)),
    ],
)
def test_shapes_by_hand(choice, expected):
    options = {
        "max_prompt": 64,
        "max_new_tokens": 64,
        "samples_per_prompt": 8,
        "prompts": 8,
        "tokens_per_microbatch": 1024,
    }
    assert pack_shape(**options | choice) == expected


def test_impossible_shapes_and_trajectories_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"64 positions .* = 72"):
        pack_shape(
            max_prompt=8,
            max_new_tokens=64,
            samples_per_prompt=2,
            prompts=2,
            tokens_per_microbatch=512,
            row_length=64,
        )
    shape = PackShape(rows=1, length=6, targets=6, micro_batches=1)
    with pytest.raises(ValueError, match="3 prompt and 4 response tokens, a row holds 6"):
        pack([trajectory(0, [1, 2, 3], [4] * 4)], shape, aggregation="token-mean")
    with pytest.raises(ValueError, match="empty prompt"):
        pack([trajectory(0, [], [4])], shape, aggregation="token-mean")
    with pytest.raises(ValueError, match="2 sequences need 2 rows"):
        pack([trajectory(g, [1, 2, 3], [4] * 3) for g in range(2)], shape, aggregation="token-mean")


def test_the_empty_batch_has_the_dtypes_of_the_record():
    batch = empty_batch(PackShape(rows=2, length=8, targets=6, micro_batches=3))
    assert {name: str(field.dtype) for name, field in batch._asdict().items()} == dict.fromkeys(
        ("tokens", "positions", "segments", "branches", "source", "target", "sequence"), "int32"
    ) | {"mask": "bool"} | dict.fromkeys(("weight", "advantage", "old_logp", "ref_logp", "rollout_logp"), "float32")
    assert batch.tokens.shape == (3, 2, 8)
    assert batch.target.shape == (3, 2, 6)
