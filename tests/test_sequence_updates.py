"""Critics, students of teachers and methods from files on rows cut along time: gradients and metrics of one device."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_post import recipes
from jaxrl_post.loops import job as online_job
from jaxrl_post.loops import offline_job
from jaxrl_post.loops.critic import Critic
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.network import initial_params
from jaxrl_post.loops.offline_learner import OfflineLearner
from jaxrl_post.loops.taught_advantage import TaughtAdvantages
from jaxrl_post.loops.teachers import Teachers
from jaxrl_post.observe.progress import Phases
from jaxrl_post.types import Trajectory

ROOT = Path(__file__).parent.parent
TINY = ROOT / "configs" / "tiny"
ONE, TWO = "", "sequence=2"
RING, EXCHANGE = "fsdp=2 sequence=2 tensor=2", "fsdp=2 sequence=2 tensor=2 ulysses"
EXPERTS = "{family: qwen3_moe, kv_heads: 4, layers: 1, experts: {count: 4, size: 32}}"
LARGE = "random: {family: qwen3, hidden_size: 32, kv_heads: 4, layers: 1, initializer_range: 0.3}"
LESSONS = "data.task={kind: jsonl, path: configs/tiny/data/lessons.jsonl}"
SHOWN = f"teachers: {{sums: {{kind: start, demonstration: demonstration}}, words: {{{LARGE}, seed: 1}}}}"
TEACHERS = f"algorithm={{kind: distillation, {SHOWN}}}"
RESPONSES, R = (6, 3, 1, 5, 6, 2, 4, 6), 6
SMALL = [
    f"rollout.max_new_tokens={R}", "rollout.samples_per_prompt=4", "data.prompts_per_step=2", "algorithm.epochs=1",
    "algorithm.mini_batches=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def load(recipe, mesh, *overrides, model="{layers: 1, kv_heads: 4, initializer_range: 0.1}"):
    """The recipe on `axis=size` words; gradients are not clipped, so that moments hold them as they are."""
    sizes = [f"mesh.{word}" for word in mesh.split() if "=" in word]
    sizes += [] if "fsdp" in mesh else ["mesh.fsdp=1"]
    kind = ["training.sequence_attention=ulysses"] if "ulysses" in mesh else []
    always = ["mesh.allow_unused_devices=true", f"model.random={model}", "optimizer.max_grad_norm=null"]
    return recipes.load(TINY / f"{recipe}.yaml", [*always, *sizes, *kind, *overrides])


def gradient(opt_state):
    """Adam's first moment after one update: a tenth of the gradient."""
    return {
        jax.tree_util.keystr(path): 10 * np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(opt_state)
        if ".mu" in jax.tree_util.keystr(path)
    }


def offline(recipe, mesh, *overrides, **model):
    """Gradient and metrics of one update on eight examples."""
    job = offline_job.build(load(recipe, mesh, *overrides, **model))
    teachers = Teachers(job.teachers)
    teachers.load()
    learner = OfflineLearner(job, teachers)
    params = initial_params(job.network, 0)
    if learner.needs_reference:
        learner.keep_reference(initial_params(job.network, 1))
    state, metrics = learner.learn(learner.trained.start(params), job.examples[:8], Phases())
    return gradient(state.opt_state), metrics


def trajectories(prompts):
    draw = np.random.default_rng(0)
    return [
        Trajectory(
            i // 4, prompts[i // 4].ids, draw.integers(3, 200, n).astype(np.int32),
            draw.normal(-5, 1, n).astype(np.float32), float(draw.normal()), lesson=prompts[i // 4].lesson,
        )
        for i, n in enumerate(RESPONSES)
    ]  # fmt: skip


def two_prompts(job):
    """Of both teachers, where there are any."""
    lessons = {prompt.lesson: prompt for prompt in job.train_prompts}
    return list({p.lesson.teacher: p for p in lessons.values()}.values()) if len(lessons) > 1 else job.train_prompts[:2]


def critic(decoder, mesh):
    """Values and advantages, then gradient and metrics of the critic's update."""
    options = f"algorithm.critic={{decoder: {decoder}, max_grad_norm: null, learning_rate: 1e-3, value_clip: 0.02}}"
    job = online_job.build(load("ppo", mesh, *SMALL, options, "algorithm.bootstrap_truncated=true"))
    made, policy = Critic(job, job.config.algorithm), initial_params(job.network, 0)
    made.start(policy)
    arrays = made.arrays()
    weight = arrays["critic"]["params"]["head"]["weight"]
    drawn = 0.3 * np.random.default_rng(0).standard_normal(weight.shape).astype(np.float32)
    arrays["critic"]["params"]["head"]["weight"] = jax.device_put(drawn, weight.sharding)
    made.restore(arrays)
    samples, rewards = trajectories(two_prompts(job)), np.linspace(-1, 2, len(RESPONSES)).astype(np.float32)
    truncated = np.array([n == R for n in RESPONSES])
    assigned, measured = made.assign(samples, rewards, None, truncated, policy, Phases())
    metrics = made.learn(assigned, policy, Phases())
    said = {name: np.concatenate([getattr(t, name) for t in assigned]) for name in ("value", "advantage")}
    return gradient(made.arrays()["critic"]["opt_state"]) | said, measured | metrics


def student(mesh, *overrides):
    """Gradient and metrics of an update towards two teachers, one of which sees a demonstration."""
    job = online_job.build(load("distillation", mesh, *SMALL[:3], LESSONS, TEACHERS, *overrides))
    teachers = Teachers(job.teachers)
    teachers.load()
    learner = Learner(job, teachers)
    samples = trajectories(two_prompts(job))
    assert {t.lesson.teacher for t in samples} == {0, 1}
    state, metrics = learner.learn(learner.trained.start(initial_params(job.network, 0)), samples, Phases())
    return gradient(state.opt_state), metrics


def graded(mesh):
    """What teachers say of each token."""
    options = f"algorithm.distillation={{coef: 0.5, {SHOWN}}}"
    job = online_job.build(load("opd", mesh, *SMALL, LESSONS, options))
    teachers = Teachers(job.teachers)
    teachers.load()
    taught = TaughtAdvantages(job, job.config.algorithm.distillation, teachers, Learner(job))
    said = taught.log_probs(initial_params(job.network, 0), trajectories(two_prompts(job)))
    return {str(i): logp for i, logp in enumerate(said)}, {}


CASES = {
    "dpo": functools.partial(offline, "dpo"),
    "dpo with experts": functools.partial(offline, "dpo", model=EXPERTS),
    "sft": functools.partial(offline, "sft"),
    "kto": functools.partial(offline, "kto"),
    "reward model": functools.partial(offline, "reward_model"),
    "taught answers": lambda mesh: offline("sft_distillation", mesh, f"algorithm={{kind: sft_distillation, {SHOWN}}}"),
    "critic": functools.partial(critic, "own"),
    "critic on the policy's decoder": functools.partial(critic, "shared"),
    "student": student,
    "graded tokens": graded,
}
UNMARKED = [("reward model", TWO)]
SLOW = [("critic", TWO), *((case, mesh) for case in CASES for mesh in (RING, EXCHANGE))]


@functools.cache
def alone(case):
    return CASES[case](ONE)


@pytest.mark.parametrize(("case", "mesh"), [*UNMARKED, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)])
def test_on_rows_cut_along_time_the_numbers_are_those_of_one_device(case, mesh):
    arrays, metrics = CASES[case](mesh)
    expected, metrics_of_one = alone(case)
    assert arrays.keys() == expected.keys()
    scale = max(np.abs(x).max() for x in expected.values())
    assert scale > 1e-2
    for name, wanted in expected.items():
        np.testing.assert_allclose(arrays[name], wanted, rtol=0, atol=1e-5 * max(scale, 1), err_msg=name)
    for name, wanted in metrics_of_one.items():
        if name.startswith(("training/", "perf/", "timing", "global_seqlen")):  # of rows, which fsdp packs otherwise
            continue
        np.testing.assert_allclose(metrics[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_teacher_exchanges_heads_as_its_student_does_or_is_refused_by_name():
    build = lambda kv_heads: online_job.build(
        load("distillation", EXCHANGE, f"algorithm.teacher={{random: {{family: qwen3, kv_heads: {kv_heads}}}}}")
    )
    assert [teacher.network.model.sequence_attention for teacher in build(4).teachers] == ["ulysses"]
    with pytest.raises(ValueError, match=r"teacher .*sequence_attention=ulysses.*sequence=2 × tensor=2 = 4.*has 2 "):
        build(2)


def test_a_teacher_attends_by_its_students_backend_or_is_refused_by_name():
    """Rows that do not fit a TPU's core are the teacher's to refuse where its heads are the wider ones."""
    teacher = "algorithm.teacher={random: {family: qwen3, head_dim: 8}}"
    build = lambda *more: online_job.build(load("distillation", ONE, teacher, *more)).teachers[0]
    assert build().network.model.attention == "xla"
    by_kernels = build("model.attention=flash")
    assert by_kernels.network.model.attention == "flash"
    model = dataclasses.replace(by_kernels.network.model, platform="tpu")
    on_tpu = dataclasses.replace(by_kernels, network=dataclasses.replace(by_kernels.network, model=model))
    with pytest.raises(ValueError, match=r"teacher .*: rows of 80000 positions .* with model\.attention=flash"):
        Teachers((on_tpu,)).check_row(80000)


@pytest.mark.slow
def test_students_and_teachers_attend_by_kernels_with_the_same_numbers():
    (arrays, metrics), (expected, wanted) = student(ONE, "model.attention=flash"), alone("student")
    scale = max(np.abs(x).max() for x in expected.values())
    for name in expected:
        np.testing.assert_allclose(arrays[name], expected[name], rtol=0, atol=1e-5 * max(scale, 1), err_msg=name)
    np.testing.assert_allclose(metrics["distillation/loss"], wanted["distillation/loss"], rtol=1e-4)
