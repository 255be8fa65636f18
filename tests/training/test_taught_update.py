"""Divergences through packed rows and the update, against float64 numpy on rows that hold one sequence each.

Teachers of another family and size, the student itself, and prompts that only a teacher sees.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_training import TEMPERATURE, TINY, assert_trees_close, sgd, tiny_params, trajectories

from jaxrl_post.config_distillation import Distillation, Divergence
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Decoder, abstract, split
from jaxrl_post.models.placement import ANYWHERE
from jaxrl_post.training.distillation_loss import distillation_loss, taught_forward
from jaxrl_post.training.distillation_update import make_taught_update
from jaxrl_post.training.micro_batches import micro
from jaxrl_post.training.packing import PackShape, pack
from jaxrl_post.training.state import init_state, state_shardings
from jaxrl_post.training.teacher_view import taught_shardings, teacher_view
from jaxrl_post.training.update import row_placement
from jaxrl_post.types import Lesson, TaughtBatch
from sharding import make_mesh
from sharding.placement import place, tree_shardings
from sharding.rules import TRAIN

WIDTH, V, BETA = 48, 32, 0.3
SMALL = ModelConfig("llama", 32, 8, 16, layers=1, heads=2, kv_heads=2, head_dim=4, initializer_range=0.5)
STUDENT = tiny_params()[1]
TEACHERS = (split(Decoder(SMALL, jax.random.key(1)))[1], tiny_params(seed=2)[1])
GRAPHDEFS = (abstract(SMALL)[0], abstract(TINY)[0])
ONE = PackShape(rows=4, length=64, targets=64, micro_batches=1)


def samples():
    """Groups with: the small teacher, the large one behind a longer prompt, the large one with the student's prompt."""
    lessons = [Lesson(0), Lesson(1, (5, 4, 3, 2, 1, 6, 7, 8, 9, 10, 11, 12)), Lesson(1)]
    return [dataclasses.replace(t, lesson=lessons[t.group]) for t in trajectories(groups=3)]


def batch_of(samples, shape, share_prefix=True):
    packing = functools.partial(
        pack, shape=shape, aggregation="token-mean", keep_all=True, lessons=True, share_prefix=share_prefix
    )
    rows, n_micro, _ = packing(samples)
    numbered, _, _ = packing([dataclasses.replace(t, advantage=float(i)) for i, t in enumerate(samples, 1)])
    return TaughtBatch(rows, teacher_view(numbered, [t.lesson for t in samples])), n_micro


@functools.cache
def row_program(number):
    """Logits of one sequence alone, float32 [WIDTH, V], and the gradient that their cotangent gives the weights."""

    def logits(params, ids, length):
        at = jnp.arange(WIDTH, dtype=jnp.int32)[None]
        inside = (at < length).astype(jnp.int32)
        decoder = nnx.merge(GRAPHDEFS[number], params)
        return decoder.logits(decoder.hidden(ids, at, inside, jnp.zeros_like(inside)))[0]

    pull = lambda params, ids, length, cotangent: jax.vjp(lambda p: logits(p, ids, length), params)[1](cotangent)[0]
    return jax.jit(logits), jax.jit(pull)


def alone(params, number, prompt, response):
    ids = np.zeros((1, WIDTH), np.int32)
    ids[0, : len(prompt) + len(response)] = (*prompt, *response)
    return ids, len(prompt) + len(response)


def log_softmax(params, number, prompt, response):
    """float64 [n, V] under the temperature, of what predicts each token of the response."""
    ids, length = alone(params, number, prompt, response)
    z = np.asarray(row_program(number)[0](params, ids, length), np.float64)[len(prompt) - 1 : length - 1] / TEMPERATURE
    return z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)


def forward_kl(t, s):
    return (np.exp(t) * (t - s)).sum(-1), np.exp(s) - np.exp(t)


def reverse_kl(t, s):
    value = (np.exp(s) * (s - t)).sum(-1)
    return value, np.exp(s) * (s - t - value[:, None])


def js(t, s):
    m = np.log(BETA * np.exp(t) + (1 - BETA) * np.exp(s))
    value = BETA * (np.exp(t) * (t - m)).sum(-1) + (1 - BETA) * (np.exp(s) * (s - m)).sum(-1)
    slope = (1 - BETA) * (s - m)
    return value, np.exp(s) * (slope - (np.exp(s) * slope).sum(-1, keepdims=True))


def top_forward_kl(tail):
    def f(t, s):
        top = np.argsort(-t, axis=-1)[:, :5]
        inside = np.zeros(t.shape, bool)
        np.put_along_axis(inside, top, True, axis=-1)
        p, q = np.exp(t), np.exp(s)
        rest_p, rest_q = (np.where(inside, 0.0, x).sum(-1, keepdims=True) for x in (p, q))
        value = np.where(inside, p * (t - s), 0.0).sum(-1)
        slope = q * (1 - rest_p) - np.where(inside, p, 0.0)
        if tail:
            value = value + (rest_p * np.log(rest_p / rest_q))[:, 0]
            slope = np.where(inside, q - p, q - rest_p * q / rest_q)
        return value, slope

    return f


FORMS = {
    "forward_kl": (Divergence(divergence="forward_kl"), forward_kl),
    "reverse_kl": (Divergence(divergence="reverse_kl"), reverse_kl),
    "js": (Divergence(divergence="js", beta=BETA), js),
    "top_k": (Divergence(divergence="forward_kl", top_k=5), top_forward_kl(True)),
    "top_k_without_tail": (Divergence(divergence="forward_kl", top_k=5, tail=False), top_forward_kl(False)),
}


@functools.cache
def program(form):
    forward = taught_forward(GRAPHDEFS[1], GRAPHDEFS, FORMS[form][0], temperature=TEMPERATURE, chunk=16, place=ANYWHERE)
    teach = Distillation(kind="distillation", teacher={"kind": "start"})

    def loss(params, teachers, batch):
        made = forward(params, teachers, batch)
        total, tally = distillation_loss(teach)(made, batch.rows)
        return total, (made, tally)

    return jax.jit(jax.grad(loss, has_aux=True))


def live_samples():
    return [t for t in samples() if t.train and len(t.response_ids)]


@pytest.mark.parametrize("form", FORMS)
def test_value_and_gradient_are_those_of_separate_rows(form):
    live = live_samples()
    tokens = sum(len(t.response_ids) for t in live)
    total, expected = 0.0, jax.tree.map(lambda p: np.zeros(p.shape), STUDENT)
    for t in live:
        k, seen = t.lesson.teacher, t.lesson.prompt_ids or t.prompt_ids
        teacher = log_softmax(TEACHERS[k], k, seen, t.response_ids)
        value, slope = FORMS[form][1](teacher, log_softmax(STUDENT, 1, t.prompt_ids, t.response_ids))
        total += value.sum() / tokens
        ids, length = alone(STUDENT, 1, t.prompt_ids, t.response_ids)
        cotangent = np.zeros((WIDTH, V), np.float32)
        cotangent[len(t.prompt_ids) - 1 : length - 1] = slope / TEMPERATURE / tokens
        expected = jax.tree.map(np.add, expected, row_program(1)[1](STUDENT, ids, length, cotangent))
    batch, n_micro = batch_of(samples(), ONE)
    assert n_micro == 1
    gradient, (_, tally) = program(form)(STUDENT, TEACHERS, micro(batch, 0))
    np.testing.assert_allclose(tally.totals["distillation/loss"], total, rtol=2e-5)
    assert_trees_close(gradient, expected, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("form", [name for name in FORMS if name != "top_k_without_tail"])
def test_a_teacher_that_is_the_student_teaches_nothing(form):
    alike = [dataclasses.replace(t, lesson=Lesson(1)) for t in samples()]
    batch, _ = batch_of(alike, ONE)
    gradient, (_, tally) = program(form)(STUDENT, (TEACHERS[0], STUDENT), micro(batch, 0))
    assert abs(tally.totals["distillation/loss"]) < 1e-6
    assert max(np.abs(g).max() for g in jax.tree.leaves(gradient)) < 1e-6


def test_masses_and_overlap_are_means_over_tokens():
    teacher_mass, student_mass, overlap = [], [], []
    for t in live_samples():
        k, seen = t.lesson.teacher, t.lesson.prompt_ids or t.prompt_ids
        p = log_softmax(TEACHERS[k], k, seen, t.response_ids)
        q = log_softmax(STUDENT, 1, t.prompt_ids, t.response_ids)
        tops = [np.argsort(-x, axis=-1)[:, :5] for x in (p, q)]
        teacher_mass += np.exp(np.take_along_axis(p, tops[0], -1)).sum(-1).tolist()
        student_mass += np.exp(np.take_along_axis(q, tops[0], -1)).sum(-1).tolist()
        overlap += [len(set(a) & set(b)) / 5 for a, b in zip(*tops, strict=True)]
    _, (_, tally) = program("top_k")(STUDENT, TEACHERS, micro(batch_of(samples(), ONE)[0], 0))
    for name, values in {"teacher_mass": teacher_mass, "student_mass": student_mass, "overlap_ratio": overlap}.items():
        np.testing.assert_allclose(tally.sums[f"distillation/{name}"] / tally.tokens, np.mean(values), rtol=1e-4)


class Updater:
    """Updates by SGD of rate 1 under the small teacher and the student itself, on one mesh and pack shape."""

    def __init__(self, shape, mesh):
        self.shape, self.optimizer, self.mesh = shape, sgd(1.0), mesh
        _, params, axes = abstract(TINY)
        self.shardings = state_shardings(params, axes, self.optimizer, mesh)
        self.batch_shardings = taught_shardings(shape, mesh)
        _, small, small_axes = abstract(SMALL)
        self.teacher_shardings = (tree_shardings(small_axes, small, TRAIN, mesh), ())
        options = Distillation(kind="distillation", divergence="js", teacher={"kind": "start"})
        forward = taught_forward(
            GRAPHDEFS[1], GRAPHDEFS, options, temperature=TEMPERATURE, chunk=16,
            place=row_placement(self.batch_shardings.rows),
        )  # fmt: skip
        self.update = make_taught_update(
            forward,
            self.optimizer,
            distillation_loss(options),
            shardings=self.shardings,
            teacher_shardings=self.teacher_shardings,
            batch_shardings=self.batch_shardings,
        )

    def step(self, samples, **packing):
        batch, n_micro = batch_of(samples, self.shape, **packing)
        teachers = (place(TEACHERS[0], self.teacher_shardings[0]), ())
        state = init_state(STUDENT, self.optimizer, self.shardings)
        state, metrics, _ = self.update(state, place(batch, self.batch_shardings), np.int32(n_micro), teachers)
        assert_trees_close(jax.device_get(teachers[0]), TEACHERS[0], rtol=0)
        return jax.device_get(state.params), jax.device_get(metrics), n_micro


@pytest.mark.slow
def test_splits_packing_and_meshes_change_nothing():
    """The second teacher is the student itself, of which no gradient may flow through the teacher's side."""
    one = Updater(ONE, make_mesh({}, jax.devices()[:1]))
    params, metrics, n_micro = one.step(samples())
    unshared, unshared_metrics, _ = one.step(samples(), share_prefix=False)
    split_up = Updater(
        PackShape(rows=2, length=32, targets=32, micro_batches=8, batch_shards=2),
        make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4]),
    )
    cut, cut_metrics, cut_micro = split_up.step(samples())
    assert (n_micro, cut_micro > 1) == (1, True)
    assert metrics["distillation/loss"] > 0.01
    for other, others in ((unshared, unshared_metrics), (cut, cut_metrics)):
        assert_trees_close(other, params, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(others["distillation/loss"], metrics["distillation/loss"], rtol=1e-5)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, STUDENT)
    assert max(jax.tree.leaves(moved)) > 1e-4
