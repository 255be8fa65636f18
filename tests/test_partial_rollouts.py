"""Partial rollouts in the loop: what is trained on when, nothing lost or drawn twice, ages, exact resume."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from whole_runs import numbers, rollouts

from jaxrl_post import recipes
from jaxrl_post.data.prompts import PromptStream
from jaxrl_post.loops.flights import age_metrics, dealt
from jaxrl_post.loops.gather import Gather, spread
from jaxrl_post.loops.online import run
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.observe.progress import Phases
from jaxrl_post.rewards.reward import Scores
from jaxrl_post.rollout.sampler import Rollout
from jaxrl_post.types import Completion, Prompt, StopReason
from sharding.mesh import make_mesh, resolve_sizes

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "configs" / "tiny" / "partial_rollout.yaml"
SMALL = ["mesh.fsdp=1", "mesh.allow_unused_devices=true", "evaluation.enabled=false"]
R, SEED = 24, 5


def length_of(seed, step, request):
    """Ragged: a few tokens for most, up to R."""
    u = np.random.default_rng((seed, step, request)).random()
    return int(np.clip(-5 * np.log(u), 1, R))


class Clockwork:
    """A sampler whose requests end after `length_of` their keys; one token a tick, all at once, one replica."""

    def generate(self, params, prompts, options, *, seed, step, width, partial, hear):
        G = options.samples_per_prompt
        starts = partial.starts
        assert len(starts) == len(prompts) * G
        ends = np.array([length_of(s.seed, s.step, s.request) for s in starts])
        before = np.array([0 if s.so_far is None else len(s.so_far.ids) for s in starts])
        live, urgent = before < ends, np.array([s.urgent for s in starts])
        for tick in range(1, R + 1):
            done = before + tick >= ends
            counted, asked = (live & done, live) if partial.of == "samples" else (whole(done, G), whole(live, G, any))
            share = counted.sum() >= partial.finish_fraction * asked.sum()
            if share and whole(done, G).any() and (done | ~urgent).all():
                break
        now = np.where(live, np.minimum(before + tick, ends), before)
        made = [self.completion(i // G, s, now[i], ends[i], step) for i, s in enumerate(starts)]
        return Rollout(made, (tick,), (1,))

    def completion(self, prompt, start, now, end, step):
        old = np.zeros(0, np.int32) if start.so_far is None else start.so_far.versions
        logp = -np.arange(now, dtype=np.float32) / 7
        stop = StopReason.STOP if now == end else StopReason.UNFINISHED
        versions = np.append(old, np.full(now - len(old), step)).astype(np.int32)
        ids = np.arange(now, dtype=np.int32) + start.request
        return Completion(prompt, ids, logp, logp - 1, stop, versions=versions)


def whole(flags, G, every=all):
    return np.array([every(group) for group in flags.reshape(-1, G)])


class Lengths:
    """A reward that is 1 for more than three tokens."""

    weights = (1.0,)

    def __call__(self, responses):
        total = np.array([float(len(r.ids) > 3) for r in responses])
        return Scores(total, total[:, None])


def gather(*overrides, groups=6):
    config = recipes.load(RECIPE, [f"seed={SEED}", f"data.prompts_per_step={groups}", *overrides])
    prompts = [Prompt((i + 1,), str(i), {"row": i}) for i in range(500)]
    mesh = make_mesh(resolve_sizes({"fsdp": 1}, 1), jax.devices()[:1])
    job = SimpleNamespace(
        config=config,
        train_prompts=prompts,
        reward=Lengths(),
        tokenizer=SimpleNamespace(decode=lambda ids: "x" * len(ids)),
        network=SimpleNamespace(mesh=mesh),
        prompt_width=8,
    )
    return Gather(job, Clockwork(), PromptStream(prompts, config.data.prompts_per_step, config.seed, shuffle=False))


def steps(source, first, last):
    return [source.next(None, step, Phases()) for step in range(first, last + 1)]


def trained(samples):
    """Rows and completions of the groups that are trained on."""
    groups = zip(samples.groups(), samples.has_signal_P, strict=True)
    return [(group.prompt.row["row"], group.completions) for group, yes in groups if yes]


@pytest.mark.parametrize("of", ["samples", "groups"])
def test_every_prompt_is_trained_on_once_in_whole_groups_and_no_older_than_allowed(of):
    source = gather(f"rollout.partial={{finish_fraction: 0.6, max_age: 2, of: {of}}}")
    seen, spans = [], []
    for step, (samples, metrics) in enumerate(steps(source, 1, 12), start=1):
        assert len(samples.prompts) == 6
        assert samples.has_signal_P.sum() == metrics["training/partial/complete_groups"] >= 1
        assert samples.graded_N.reshape(6, -1).all(axis=1).tolist() == samples.has_signal_P.tolist()
        assert len(samples.graded().prompts) == samples.has_signal_P.sum()
        for row, completions in trained(samples):
            seen.append(row)
            assert len(completions) == 4
            for c in completions:
                assert c.stop is StopReason.STOP
                assert (np.diff(c.versions) >= 0).all()
                assert step - c.versions[0] <= 2
                spans.append(c.versions[-1] - c.versions[0])
    state = source.state()
    waiting = [flight["prompt"] for flight in state["under_way"]]
    assert sorted([*seen, *waiting]) == list(range(state["data"]["position"]["next_index"]))
    assert len(seen) + len(waiting) == len(set(seen + waiting))
    assert max(spans) >= 1
    assert min(spans) == 0


def test_a_group_goes_on_to_the_end_that_its_keys_have():
    source = gather("rollout.partial={finish_fraction: 0.5, max_age: 3}")
    for samples, _ in steps(source, 1, 8):
        for _, completions in trained(samples):
            for c in completions:
                request = int(c.ids[0])
                assert len(c.ids) == length_of(SEED, int(c.versions[0]), request)
                np.testing.assert_array_equal(c.logp, -np.arange(len(c.ids), dtype=np.float32) / 7)


def test_with_everything_awaited_a_step_is_a_batch_of_prompts():
    for samples, metrics in steps(gather("rollout.partial.finish_fraction=1.0"), 1, 3):
        assert samples.has_signal_P.all()
        assert metrics["training/partial/carried_samples"] == 0
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0


def test_what_is_under_way_survives_a_restart_through_json():
    filters = ["algorithm.filter_groups={max_attempts: 2}"]
    for options in ([], filters):
        straight, first, second = gather(*options), gather(*options), gather(*options)
        expected = steps(straight, 1, 6)[3:]
        steps(first, 1, 3)
        second.restore(json.loads(json.dumps(first.state())))
        for (a, metrics_a), (b, metrics_b) in zip(expected, steps(second, 4, 6), strict=True):
            assert metrics_a == metrics_b
            assert [p.row for p in a.prompts] == [p.row for p in b.prompts]
            for x, y in zip(a.rollout.completions, b.rollout.completions, strict=True):
                assert (x.ids.tolist(), x.stop, x.prompt) == (y.ids.tolist(), y.stop, y.prompt)
                for name in ("logp", "raw_logp", "versions"):
                    np.testing.assert_array_equal(getattr(x, name), getattr(y, name), strict=True)


def test_groups_without_signal_are_replaced_and_those_under_way_go_on_within_the_step():
    source = gather("algorithm.filter_groups={max_attempts: 3}", "rollout.partial.finish_fraction=0.5")
    batches = []
    for samples, metrics in steps(source, 1, 8):
        assert len(samples.prompts) == 6
        batches.append(metrics["training/filter_groups/batches"])
        assert metrics["training/filter_groups/missing_samples"] == (~samples.has_signal_P).sum() * 4
        for _, completions in trained(samples):
            assert {len(c.ids) > 3 for c in completions} == {True, False}
    assert max(batches) > 1


def test_groups_under_way_that_the_config_has_no_place_for_are_dropped(caplog):
    source = gather()
    steps(source, 1, 2)
    state = source.state()
    count = len(state["under_way"])
    assert count > 0
    for changed in ("rollout.samples_per_prompt=2", "rollout.partial=null"):
        caplog.clear()
        gather(changed).restore(state)
        assert f"dropping {count} groups under way" in caplog.text
    fewer = gather(groups=1)  # the others wait for their turn
    fewer.restore(state)
    assert len(fewer.state()["under_way"]) == count
    samples, _ = fewer.next(None, 9, Phases())
    assert samples.has_signal_P.all()
    assert len(fewer.state()["under_way"]) == count - 1


def test_mini_batches_get_equal_shares():
    assert spread(8, 0) == list(range(8))
    assert spread(3, 3) == [0, 3, 1, 4, 2, 5]
    for n in range(9):
        order = np.array(spread(n, 8 - n))
        assert sorted(order) == list(range(8))
        assert abs((order[:4] < n).sum() - (order[4:] < n).sum()) <= 1


def test_groups_under_way_are_dealt_to_the_replicas():
    assert dealt(8, 2) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert dealt(5, 2) == [0, 3, 1, 4, 2]
    assert dealt(3, 1) == [0, 1, 2]


def test_ages_by_hand():
    versions = ([5, 5, 5], [3, 4, 5, 5], [3, 3], [4, 5])
    empty = np.zeros(0, np.float32)
    made = [Completion(0, empty, empty, empty, StopReason.STOP, versions=np.array(v, np.int32)) for v in versions]
    assert age_metrics(made, 5) == {
        "training/off_policy/trajectory_spans/mean": 1.75,
        "training/off_policy/trajectory_spans/max": 3.0,
        "training/off_policy/trajectory_spans/min": 1.0,
        "training/off_policy/trajectory_staleness/mean": 0.5,
        "training/off_policy/trajectory_staleness/max": 2.0,
        "training/off_policy/trajectory_staleness/min": 0.0,
        "training/off_policy/trajectory_staleness_worst/mean": 1.25,
        "training/off_policy/trajectory_staleness_worst/max": 2.0,
        "training/off_policy/trajectory_staleness_worst/min": 0.0,
        "fully_async/partial/total_partial_num": 2.0,
        "fully_async/partial/partial_ratio": 0.5,
        "fully_async/partial/max_partial_span": 2.0,
    }


@pytest.mark.parametrize("kind", ["policy_gradient", "gpg"])
def test_a_loss_without_a_ratio_is_refused_stale_tokens(kind):
    words = [f"algorithm.kind={kind}", "rollout.partial={max_age: 2}"]
    with pytest.raises(ValueError, match=rf"algorithm\.kind={kind} takes all as the policy's own"):
        recipes.load(ROOT / "configs" / "tiny" / f"{kind}.yaml", words)


# Whole runs.


def train(run_dir, *overrides):
    run(recipes.load(RECIPE, [f"run_dir={run_dir}", *SMALL, *overrides]))
    return read_metrics(Path(run_dir) / "metrics.jsonl")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(folder, "steps=5")


@pytest.fixture(scope="module")
def off(tmp_path_factory):
    folder = tmp_path_factory.mktemp("off")
    return folder, train(folder, "steps=2", "rollout.partial=null", "checkpoint.every=0")


@pytest.mark.slow
def test_a_run_trains_on_whole_groups_of_several_policies(straight):
    folder, records = straight
    assert [r["compile/count"] for r in records[2:]] == [0, 0, 0]
    spans, stale = [], []
    for step, record in enumerate(records, start=1):
        samples = rollouts(folder, step)
        assert len(samples) == 4 * record["training/partial/complete_groups"]
        assert {s["stop"] for s in samples} <= {"stop", "length"}
        worst = [step - min(s["versions"]) for s in samples]
        assert max(worst) == record["training/off_policy/trajectory_staleness_worst/max"] <= 2
        assert all(len(s["versions"]) == len(s["ids"]) == len(s["logp"]) for s in samples)
        assert record["training/trained_sequences"] == sum(s["advantage"] != 0 for s in samples)
        np.testing.assert_allclose(record["critic/score/mean"], np.mean([s["reward"] for s in samples]))
        spans += [max(s["versions"]) - min(s["versions"]) for s in samples]
        stale.append(any(min(s["versions"]) < step for s in samples if s["advantage"] != 0))
    assert max(spans) >= 1
    assert set(stale) == {True, False}
    assert [abs(r["rollout_corr/kl"]) > 1e-3 for r in records] == stale


@pytest.mark.slow
def test_killed_and_run_again_equals_never_stopped(tmp_path, straight):
    """SIGKILL in step 3 or 4 of a process of its own, resumed here."""
    folder, records = straight
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    command = [sys.executable, "-m", "launch", str(RECIPE), f"run_dir={tmp_path}", "steps=5", *SMALL]
    killed = subprocess.Popen(command, cwd=ROOT, env=os.environ | cache, stdout=subprocess.PIPE, text=True)
    for line in killed.stdout:
        if line.lstrip().startswith("step 3/"):
            break
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] < 5
    again = train(tmp_path, "steps=5")
    assert [numbers(r) for r in again] == [numbers(r) for r in records]
    assert [rollouts(tmp_path, step) for step in range(1, 6)] == [rollouts(folder, step) for step in range(1, 6)]


@pytest.mark.slow
def test_awaiting_everything_is_a_run_without_partial_rollouts_bit_for_bit(tmp_path, off):
    folder, records = off
    everything = train(tmp_path, "steps=2", "rollout.partial.finish_fraction=1.0", "checkpoint.every=0")
    kept = [{k: v for k, v in numbers(r).items() if k in records[0]} for r in everything]
    assert kept == [numbers(r) for r in records]
    for step in (1, 2):
        mine = rollouts(tmp_path, step)
        assert all(s.pop("versions") == [step] * len(s["ids"]) for s in mine)
        assert mine == rollouts(folder, step)


@pytest.mark.slow
def test_without_learning_a_sample_is_the_same_in_one_step_or_over_several(tmp_path, off):
    """The prompts of step 1 have the same keys in both runs."""
    train(tmp_path, "steps=3", "optimizer.learning_rate=0", "rollout.partial.finish_fraction=0.5", "checkpoint.every=0")
    pieces = [s for step in (1, 2, 3) for s in rollouts(tmp_path, step) if s["versions"][0] == 1]
    assert max(s["versions"][-1] for s in pieces) > 1
    whole_ones = {(tuple(s["prompt_ids"]), tuple(s["ids"])): s for s in rollouts(off[0], 1)}
    assert len(pieces) == len(whole_ones) == 32
    for s in pieces:
        in_one_go = whole_ones[tuple(s["prompt_ids"]), tuple(s["ids"])]
        np.testing.assert_allclose(s["logp"], in_one_go["logp"], atol=1e-5)
        assert (s["stop"], s["reward"]) == (in_one_go["stop"], in_one_go["reward"])


@pytest.mark.slow
def test_a_critic_and_several_mini_batches_learn_from_the_groups_that_are_whole(tmp_path):
    recipe = ROOT / "configs" / "tiny" / "decoupled_ppo.yaml"
    pairs = ["data.prompts_per_step=8", "rollout.samples_per_prompt=2", "rollout.partial={finish_fraction: 0.3}"]
    ragged = [f"rollout.stop_token_ids={list(range(97, 127))}"]
    reward = "reward.function=jaxrl_post.rewards.text:distinct_fraction"
    run(recipes.load(recipe, [f"run_dir={tmp_path}", *SMALL, "steps=3", reward, *pairs, *ragged]))
    records = read_metrics(tmp_path / "metrics.jsonl")
    finished = [2 * record["training/partial/complete_groups"] for record in records]
    trained = [record["training/trained_sequences"] for record in records]
    assert all(0 < count < 16 for count in finished)
    assert all(t in (0, f) for t, f in zip(trained, finished, strict=True)), "0 where all advantages are alike"
    assert max(trained) > 0
    assert np.isfinite([record["critic/vf_loss"] for record in records]).all()
