"""Samples are graded while others are still sampled: the same scores, whatever the graders do."""

import functools
import os
import sys
import time

import jax
import numpy as np
import pytest
from test_reward_pool import children

from jaxrl_post import recipes
from jaxrl_post.data.prompts import PromptStream
from jaxrl_post.loops.gather import Gather
from jaxrl_post.loops.job import build
from jaxrl_post.loops.network import initial_params, rollout_params
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.observe.progress import Phases
from jaxrl_post.rewards.ahead import Ahead
from jaxrl_post.rewards.pool import Pool
from jaxrl_post.rewards.worker import Target
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.types import Prompt, Response
from launch.__main__ import main

SOURCE = """
import os, pathlib, time

def score(prompts, completions, rows):
    folder = pathlib.Path(os.environ["EARLY_GRADES"])
    begun = folder / f"{time.monotonic_ns()}_{os.getpid()}"
    begun.write_text(completions[0], encoding="utf-8")
    weight = sum(map(ord, "".join(completions)))
    if weight % 8 == 0:
        os._exit(3)
    if weight % 8 == 1:
        time.sleep(1000)
    if weight % 8 == 2:
        raise ValueError("not today")
    time.sleep(0.02)
    return [float(weight % 97)] * len(completions)
"""
EARLY = "kind: function, function: 'a:b', early: true"
SMALL = (
    "mesh.fsdp=1", "mesh.allow_unused_devices=true", "rollout.max_new_tokens=12", "data.prompts_per_step=4",
    "rollout.samples_per_prompt=8", "evaluation.enabled=false", "training.tokens_per_microbatch=256", "steps=2",
    "model.random={family: llama, layers: 1, hidden_size: 16, intermediate_size: 32}", "reward.workers=2",
    "reward.function=early_grader:score", "reward.timeout=1.5", "reward.failure_score=-5.0",
    "rollout.stop_token_ids=[" + ",".join(map(str, range(100, 140))) + "]",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def grades(tmp_path_factory):
    """The folder in which workers note what they begin with, and when."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "early_grader.py").write_text(SOURCE)
    (folder / "grades").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("EARLY_GRADES", str(folder / "grades"))
        yield folder / "grades"
    sys.modules.pop("early_grader", None)
    assert not children()


def begun(folder):
    """When each call began, in seconds."""
    return sorted(int(path.name.partition("_")[0]) / 1e9 for path in folder.iterdir())


class Watched(Sampler):
    """Waits, where samples are handed over, until a worker has begun; so fast is no rollout otherwise."""

    folder, handed, ended = None, 0, 0.0

    def generate(self, *args, hear=None, **keys):
        def tell(news):
            hear(news)
            self.handed += len(news)
            deadline = time.monotonic() + 60
            while self.handed and not begun(self.folder):
                assert time.monotonic() < deadline, "no worker begins while samples are drawn"
                time.sleep(0.01)

        rollout = super().generate(*args, hear=tell if hear else None, **keys)
        self.ended = time.monotonic()
        return rollout


@functools.cache
def gathered(early, folder):
    """Two steps; when the last rollout ended; the run's phases and counts."""
    for path in folder.iterdir():
        path.unlink()
    job = build(recipes.load("configs/tiny/grpo.yaml", [f"reward.early={early}", *SMALL]))
    network, stream = job.network, PromptStream(job.train_prompts, 4, 0, True)
    sampler = Watched(network.graphdef, network.model, network.mesh, job.stop_ids)
    sampler.folder = folder
    gather, phases = Gather(job, sampler, stream), Phases()
    params = rollout_params(network, initial_params(network, 0))
    steps = [gather.next(params, step, phases)[0] for step in (1, 2)]
    counts = job.reward.collect()
    job.reward.close()
    return steps, sampler, begun(folder), phases.collect(), counts


def test_grading_begins_before_the_rollout_has_ended(grades):
    _, sampler, times, timing, _ = gathered("true", grades)
    early = [when for when in times if when < sampler.ended]
    assert 32 < len(times) <= 64 + 8
    assert len(early) > 1
    assert sampler.handed > 32  # of 64: most samples of a rollout are told of before its end
    assert 0 < timing["timing_s/reward_early"] <= timing["timing_s/gen"]


def test_late_grading_begins_after(grades):
    _, sampler, times, timing, _ = gathered("auto", grades)  # on a CPU
    assert sampler.handed == 0
    assert sum(when < sampler.ended for when in times) <= 32  # the step before
    assert "timing_s/reward_early" not in timing


def test_samples_scores_and_faults_are_the_same_whenever_they_are_graded(grades):
    early, *_, counts = gathered("true", grades)
    late, *_, late_counts = gathered("auto", grades)
    assert counts == late_counts
    assert min(count for name, count in counts.items() if name != "reward/all_failed") > 0
    for one, other in zip(early, late, strict=True):
        assert one.texts == other.texts
        np.testing.assert_array_equal(one.scores.heads_NK, other.scores.heads_NK)
        for a, b in zip(one.rollout.completions, other.rollout.completions, strict=True):
            jax.tree.map(np.testing.assert_array_equal, vars(a), vars(b))
        assert one.rollout.decode_steps == other.rollout.decode_steps


@pytest.mark.slow
def test_processes_begin_with_what_lies_on_their_own_devices(tmp_path, monkeypatch):
    """Two processes of two devices each: samples and scores of a run that grades late, byte by byte."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    words = [*SMALL[1:], "mesh.data=2", "mesh.fsdp=2", "checkpoint.every=0"]
    for early in ("auto", "true"):
        run_dir = f"run_dir={tmp_path / early}"
        assert main(["configs/tiny/grpo.yaml", "--processes", "2", "--devices-per-process", "2", run_dir,
                     f"reward.early={early}", *words]) == 0  # fmt: skip
    late, early = (tmp_path / which / "rollouts" for which in ("auto", "true"))
    assert [path.name for path in sorted(early.iterdir())] == ["step_000001.jsonl", "step_000002.jsonl"]
    assert all(path.read_bytes() == (late / path.name).read_bytes() for path in early.iterdir())
    assert all("timing_s/reward_early" in row for row in read_metrics(tmp_path / "true" / "metrics.jsonl"))


@pytest.fixture
def ahead():
    pool = Pool("r", Target("early_grader:score", {}), 1, 30.0)
    yield lambda per: Ahead(pool, per)
    pool.close()


def response(prompt, text):
    return Response(prompt, text, np.array([2]))


def test_groups_are_graded_when_they_are_whole(ahead, grades):
    for path in grades.iterdir():
        path.unlink()
    score = ahead("group")
    one, two = Prompt((1,), "one", {}), Prompt((2,), "two", {})
    a, b, c, d = (response(p, text) for p, text in ((one, "a"), (one, "c"), (two, "k"), (two, "k")))
    score.begin([[a, None], [c, d]])
    score.begin([[a, None], [c, d]])  # nothing new
    assert [graded.score for graded in score([a, b, c, d])] == [(97 + 99) % 97] * 2 + [(107 * 2) % 97] * 2
    assert [path.read_text() for path in sorted(grades.iterdir())] == ["k", "a"]
    assert [graded.score for graded in score([c, d])] == [20.0, 20.0]  # nothing is kept for a later step
    assert len(list(grades.iterdir())) == 3


def test_calls_that_nobody_waits_for_end_with_their_workers(ahead):
    score = ahead("sample")
    prompt = Prompt((1,), "q", {})
    score.begin([[response(prompt, "y")]])  # hangs
    score._pool.stop()
    assert not children()
    assert [graded.score for graded in score([response(prompt, "k")])] == [10.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("workers: 0", "rollout.top_k=0"), "workers=0 has none"),
        (("per: step", "rollout.top_k=0"), "early=true cannot be with per=step"),
        (("per: group", "rollout.partial={}"), "reward.early=true grades samples of whole rollouts"),
    ],
)
def test_what_cannot_be_early_is_refused(words, said):
    reward, other = words
    with pytest.raises(ValueError, match=said):
        recipes.load("configs/tiny/grpo.yaml", [f"reward={{{EARLY}, {reward}}}", other])
