"""Distillation in whole: what teachers say of sampled tokens and given answers, runs, resume, and what is refused."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from models.tiny_models import BASE, draw

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.loops import offline_job
from jaxrl_post.loops.job import build
from jaxrl_post.loops.network import decoder_params
from jaxrl_post.loops.offline_learner import OfflineLearner
from jaxrl_post.loops.online import run
from jaxrl_post.loops.taught_advantage import TaughtAdvantages
from jaxrl_post.loops.teachers import Teachers
from jaxrl_post.models.huggingface_export import save_params
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.observe.progress import Phases
from jaxrl_post.types import Trajectory
from launch.byte_tokenizer import write_byte_tokenizer

ROOT = Path(__file__).parent.parent
TINY = ROOT / "configs" / "tiny"
ONE_DEVICE = ["mesh.fsdp=1", "mesh.allow_unused_devices=true"]
LESSONS = "data.task={kind: jsonl, path: configs/tiny/data/lessons.jsonl}"
LARGE = "random: {family: qwen3, hidden_size: 32, layers: 1, initializer_range: 0.3}"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def load(name, *overrides):
    return recipes.load(TINY / f"{name}.yaml", [*ONE_DEVICE, *overrides])


@functools.cache
def row_program(graphdef):
    def log_probs(params, ids_1T, length):
        at = np.arange(ids_1T.shape[1], dtype=np.int32)[None]
        inside = (at < length).astype(np.int32)
        decoder = nnx.merge(graphdef, params)
        return jax.nn.log_softmax(decoder.logits(decoder.hidden(ids_1T, at, inside, 0 * inside)))[0]

    return jax.jit(log_probs)


def alone(graphdef, params, prompt, response):
    """float64 [n, V]: what a row that holds this sequence alone says before each token of the response."""
    ids = np.zeros((1, 160), np.int32)
    n = len(prompt) + len(response)
    ids[0, :n] = (*prompt, *response)
    return np.asarray(row_program(graphdef)(params, ids, n), np.float64)[len(prompt) - 1 : n - 1]


def digest(params):
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()


# -------------------------------------------------------------------------------------------------- by the advantage


def test_a_teacher_grades_the_tokens_it_is_named_for_after_the_prompt_it_sees():
    """Of the run's first weights with a demonstration, and of a teacher with the student's prompt."""
    teachers = f"teachers: {{sums: {{kind: start, demonstration: demonstration}}, words: {{{LARGE}, seed: 1}}}}"
    options = f"algorithm.distillation={{coef: 0.5, reward_weight: 2.0, {teachers}}}"
    job = build(load("opd", LESSONS, options, "rollout.max_new_tokens=6", "rollout.samples_per_prompt=2"))
    weights = Teachers(job.teachers)
    weights.load()
    before = digest(weights.params)
    rng = np.random.default_rng(0)
    prompts = [next(p for p in job.train_prompts if p.row["teacher"] == tag) for tag in ("words", "sums")] * 2
    assert [prompt.lesson.teacher for prompt in prompts[:2]] == [1, 0]
    assert job.tokenizer.decode(prompts[1].lesson.prompt_ids) == "user: 1 + 1 is 2.\n\nWhat is 1 + 1?\nassistant: "
    draw = lambda n: rng.integers(3, 200, n).astype(np.int32)
    trajectories = [
        Trajectory(i, p.ids, draw(n), rng.normal(-5, 1, n).astype(np.float32), 0.3 * i, i != 2, lesson=p.lesson)
        for i, (p, n) in enumerate(zip(prompts, (6, 4, 5, 1), strict=True))
    ]
    old = [t.logp[: len(t.logp) * t.train] for t in trajectories]
    learner = SimpleNamespace(old_logprobs=lambda state, trajectories, phases: old)
    taught = TaughtAdvantages(job, job.config.algorithm.distillation, weights, learner)
    assigned, metrics = taught.assign(trajectories, SimpleNamespace(params=None), Phases())
    gaps = []
    for t, made in zip(trajectories, assigned, strict=True):
        if not t.train:
            assert made is t
            continue
        teacher = job.teachers[t.lesson.teacher]
        seen = t.prompt_ids if t.lesson.prompt_ids is None else t.lesson.prompt_ids
        logp = alone(teacher.network.graphdef, weights.params[t.lesson.teacher], seen, t.response_ids)
        gap = t.logp - logp[np.arange(len(t.logp)), t.response_ids]
        np.testing.assert_allclose(made.advantage, 2.0 * t.advantage - 0.5 * gap, rtol=1e-4, atol=1e-5)
        gaps += gap.tolist()
    np.testing.assert_allclose(metrics["distillation/opd_reverse_kl"], np.mean(gaps), rtol=1e-4)
    assert digest(weights.params) == before


def train(name, folder, *overrides):
    run(load(name, f"run_dir={folder}", "evaluation.enabled=false", *overrides))
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "metric"), [("opd", "opd_reverse_kl"), ("distillation", "loss")])
def test_without_a_reward_the_student_moves_to_its_teacher(tmp_path, recipe, metric):
    """Every answer is wrong, so no group has an advantage of its own. Both metrics are the reverse KL."""
    records = train(recipe, tmp_path, "steps=8", "reward={kind: exact_match}")
    kl = [r[f"distillation/{metric}"] for r in records]
    assert {r["frac_reward_zero_std"] for r in records} == {1.0}
    assert {r["training/trained_sequences"] for r in records} == {32}
    assert kl[-1] < 0.7 * kl[0]


# -------------------------------------------------------------------------------------------------------- by the loss


def saved(folder, step):
    config = recipes.load(folder / "config.yaml")
    job = build(config)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        job.network.abstract_params,
        job.network.shardings(),
    )
    arrays, _ = Checkpointer(folder / "checkpoints", 2).restore(step, {"params": shapes}, True)
    return jax.device_get(arrays)


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path):
    """Two teachers by tag come back from the recipe alone."""
    steady = lambda records: [
        {k: v for k, v in r.items() if not k.startswith(("timing_s/", "perf/", "compile/"))} for r in records
    ]
    options = ["algorithm.epochs=2"]
    straight = train("distillation_teachers", tmp_path / "straight", "steps=4", *options)
    train("distillation_teachers", tmp_path / "halves", "steps=2", *options)
    halves = train("distillation_teachers", tmp_path / "halves", "steps=4", *options)
    assert steady(halves) == steady(straight)
    jax.tree.map(np.testing.assert_array_equal, saved(tmp_path / "straight", 4), saved(tmp_path / "halves", 4))
    losses = [r["distillation/loss"] for r in straight]
    assert losses[-1] < 0.95 * losses[0]
    assert straight[-1]["distillation/student_mass"] > straight[0]["distillation/student_mass"]
    assert {"distillation/teacher_mass", "distillation/overlap_ratio", "critic/score/mean"} <= set(straight[0])


# --------------------------------------------------------------------------------------------------- on given answers


def test_given_answers_are_taught_as_separate_rows_say():
    """Several micro-batches; one of the teachers sees a demonstration."""
    config = load("sft_distillation", "training.tokens_per_microbatch=128", "algorithm.sft_weight=0.25")
    job = offline_job.build(config)
    teachers = Teachers(job.teachers)
    teachers.load()
    learner = OfflineLearner(job, teachers)
    network = job.network
    params = decoder_params(None, network.model, config.seed, network.shardings())
    metrics = learner.evaluate(params, job.examples, Phases())
    divergence, nll = [], []
    for example in job.examples:
        (answer,) = example.answers
        student = alone(network.graphdef, params, example.prompt_ids, answer.ids)
        seen, k = example.lesson.prompt_ids or example.prompt_ids, example.lesson.teacher
        teacher = alone(job.teachers[k].network.graphdef, teachers.params[k], seen, answer.ids)
        divergence += (np.exp(teacher) * (teacher - student)).sum(-1).tolist()
        nll += (-student[np.arange(len(answer.ids)), answer.ids]).tolist()
    assert {e.lesson.teacher: e.lesson.prompt_ids is None for e in job.examples} == {0: True, 1: False}
    np.testing.assert_allclose(metrics["val-aux/distillation/loss"], np.mean(divergence), rtol=1e-4)
    np.testing.assert_allclose(metrics["val-aux/nll_loss"], np.mean(nll), rtol=1e-4)
    expected = 0.75 * np.mean(divergence) + 0.25 * np.mean(nll)
    np.testing.assert_allclose(metrics["val-core/loss"], expected, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algorithm={kind: distillation}", ["exactly one of teacher", "teachers"]),
        ("algorithm={kind: distillation, teacher: {}}", ["algorithm.teacher", "exactly one of path and random"]),
        (
            "algorithm={kind: distillation, teacher: {kind: start}, overlong: {}}",
            ["algorithm.overlong", "none of them"],
        ),
        ("algorithm={kind: distillation, teacher: {kind: start}, beta: 0.3}", ["beta=0.3", "divergence=js"]),
        ("algorithm={kind: distillation, teacher: {kind: start}, tail: false}", ["tail=false", "top_k"]),
        ("algorithm={kind: distillation, teacher: {kind: self, template: x}}", ["template='x'", "{demonstration}"]),
        ("algorithm={kind: distillation, teacher: {kind: start, path: x}}", ["algorithm.teacher.path", "kind model"]),
        (
            "algorithm={kind: dapo, distillation: {reward_weight: 0, teacher: {kind: start}}}",
            ["reward_weight=0", "algorithm.filter_groups to null"],
        ),
    ],
)
def test_options_that_cannot_act_are_refused(override, parts):
    with pytest.raises(ValueError, match="algorithm") as refused:
        load("distillation", override)
    assert not [part for part in parts if part not in str(refused.value)], refused.value


@pytest.mark.parametrize(
    ("row", "teacher", "parts"),
    [
        ({"teacher": "maths"}, "teachers: {sums: {kind: start}}", ["'Why?'", "teacher='maths'", "sums"]),
        ({}, "teachers: {sums: {kind: start}}", ["'Why?'", "lacks 'teacher'"]),
        ({}, "teacher: {kind: self}", ["'Why?'", "no text field 'demonstration'"]),
        ({}, "teacher: {path: nowhere}", ["teacher 'teacher'", "path=nowhere", "neither a folder"]),
        ({"demonstration": "x" * 9000}, "teacher: {kind: self}", ["8192 positions"]),
    ],
)
def test_rows_and_teachers_that_do_not_fit_are_named_before_any_step(tmp_path, row, teacher, parts):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "Why?", "answer": "so"} | row) + "\n")
    task = f"data.task={{kind: jsonl, path: {file}}}"
    config = load("distillation", task, f"algorithm={{kind: distillation, {teacher}}}")
    with pytest.raises(ValueError, match="teacher") as refused:
        build(config)
    assert not [part for part in parts if part not in str(refused.value)], refused.value


def test_a_teacher_of_another_vocabulary_is_refused_by_its_name(tmp_path):
    """Another size, and other ids for the same tokens; the student's own files are accepted."""

    def folder(name, vocab_size, swapped=False):
        shape = dataclasses.replace(BASE, vocab_size=vocab_size, tie_embeddings=True, max_positions=256)
        save_params(tmp_path / name, draw(shape), shape)
        write_byte_tokenizer(tmp_path / name)
        file = tmp_path / name / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        if swapped:
            content["model"]["vocab"] |= {"a": 98, "b": 97}
        file.write_text(json.dumps(content), encoding="utf-8")
        return tmp_path / name

    teachers = {"good": folder("good", 264), "large": folder("large", 272), "swapped": folder("swapped", 264, True)}
    task = tmp_path / "rows.jsonl"

    def built(tag):
        task.write_text(json.dumps({"prompt": "Why?", "teacher": tag}) + "\n")
        asked = f"algorithm={{kind: distillation, teachers: {{{tag}: {{path: {teachers[tag]}}}}}}}"
        return build(load("distillation", f"data.task={{kind: jsonl, path: {task}}}", asked))

    assert built("good").teachers[0].network.model.hidden_size == BASE.hidden_size
    with pytest.raises(ValueError, match=r"teacher 'large': .*vocabulary of 272, the student's has 264"):
        built("large")
    with pytest.raises(ValueError, match=r"teacher 'swapped': .*token 'a' is id 98 there and 97 here"):
        built("swapped")
