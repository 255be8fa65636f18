"""Divergences against float64 numpy on the full vocabulary and on a teacher's top tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives import distillation as distil

MASK = np.array([[1, 1, 0], [1, 0, 0]], bool)
RNG = np.random.default_rng(0)
TEACHER, STUDENT = RNG.normal(0, 2, (2, 2, 3, 6))
IDS = np.argsort(-TEACHER, axis=-1)[..., :3]


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


T, S = log_softmax(TEACHER), log_softmax(STUDENT)


def kl(p, q):
    return (np.exp(p) * (p - q)).sum(-1)


def js(t, s, beta):
    m = np.log(beta * np.exp(t) + (1 - beta) * np.exp(s))
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def tail(x):
    return np.concatenate([x, np.log(1 - np.exp(x).sum(-1, keepdims=True))], -1)


FORMS = {
    "forward": (distil.forward_kl, kl),
    "reverse": (distil.reverse_kl, lambda t, s: kl(s, t)),
    "js": (lambda *a: distil.js_divergence(*a, beta=0.3), lambda t, s: js(t, s, 0.3)),
}


def run(f, student_logits, top_k):
    """Value and gradient by the student's logits, garbage under the mask, compiled."""
    mask = jnp.asarray(MASK)
    teacher = jnp.asarray(np.where(MASK[..., None], T, np.nan), jnp.float32)

    def total(logits):
        if not top_k:
            term = f(teacher, jax.nn.log_softmax(jnp.where(mask[:, :, None], logits, 0.0)), mask)
            return term.sum(), term
        top = jnp.take_along_axis(teacher, jnp.asarray(IDS), axis=-1)
        student = distil.at(logits, jnp.asarray(np.where(MASK[..., None], IDS, -999)), mask)
        term = f(distil.with_tail(top, mask), distil.with_tail(student, mask), mask)
        return term.sum(), term

    (_, term), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(student_logits)
    return np.asarray(term), np.asarray(gradient)


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("top_k", [False, True])
def test_values_gradients_and_masked_garbage(name, top_k):
    f, reference = FORMS[name]
    view = lambda x: tail(np.take_along_axis(x, IDS, -1)) if top_k else x
    dirty = np.where(MASK[..., None], STUDENT, np.nan).astype(np.float32)
    term, gradient = run(f, dirty, top_k)
    np.testing.assert_allclose(term, np.where(MASK, reference(view(T), view(S)), 0), rtol=1e-4)
    assert (term[MASK] > 0).all()
    slope = np.zeros_like(STUDENT)
    for v in range(6):
        step = np.eye(6)[v] * 1e-5
        up, down = (reference(view(T), view(log_softmax(STUDENT + d))) for d in (step, -step))
        slope[..., v] = (up - down) / 2e-5
    np.testing.assert_allclose(gradient, np.where(MASK[..., None], slope, 0), atol=2e-5)
    same, zero = run(f, np.where(MASK[..., None], TEACHER + 3, np.inf).astype(np.float32), top_k)
    np.testing.assert_allclose(same, 0, atol=2e-6)
    np.testing.assert_allclose(zero, 0, atol=2e-6)


def test_top_k_without_a_tail_sums_the_given_tokens_only():
    mask = jnp.asarray(MASK)
    student = distil.at(jnp.asarray(STUDENT, jnp.float32), jnp.asarray(IDS), mask)
    top_t, top_s = (np.take_along_axis(x, IDS, -1) for x in (T, S))
    np.testing.assert_allclose(student, np.where(MASK[..., None], top_s, 0), rtol=1e-5)
    got = distil.forward_kl(jnp.asarray(top_t, jnp.float32), student, mask)
    np.testing.assert_allclose(got, np.where(MASK, kl(top_t, top_s), 0), rtol=1e-4)


@pytest.mark.parametrize("name", list(FORMS))
def test_tokens_neither_side_can_emit_add_nothing(name):
    f, reference = FORMS[name]
    minus = np.where(np.arange(6) == 2, -np.inf, 0)
    teacher, student = (log_softmax(x + minus) for x in (TEACHER, STUDENT))

    @jax.jit
    def total(student_logp):
        term = f(np.float32(teacher), student_logp, jnp.asarray(MASK))
        return term.sum(), term

    (_, value), gradient = jax.value_and_grad(total, has_aux=True)(np.float32(student))
    keep = [0, 1, 3, 4, 5]
    np.testing.assert_allclose(value, np.where(MASK, reference(teacher[..., keep], student[..., keep]), 0), rtol=1e-4)
    assert np.isfinite(gradient).all()


def test_js_needs_an_inner_beta():
    for beta in (0.0, 1.0):
        with pytest.raises(ValueError, match=rf"beta={beta}.*forward_kl or reverse_kl"):
            distil.js_divergence(jnp.zeros((1, 1, 2)), jnp.zeros((1, 1, 2)), jnp.ones((1, 1), bool), beta=beta)


def test_teacher_advantage():
    mask = jnp.array([[1, 1, 0]], bool)
    logp, teacher = jnp.array([[-1.0, -2.0, jnp.nan]]), jnp.array([[-1.5, -50.0, jnp.inf]])
    got = distil.teacher_advantage(jnp.array([[1.0, 1.0, jnp.nan]]), logp, teacher, mask, coef=0.1)
    np.testing.assert_allclose(got, [[0.95, -1.0, 0]], rtol=1e-6)
    assert jax.grad(lambda x: distil.teacher_advantage(0 * x, x, teacher, mask, coef=1.0).sum())(logp).tolist() == [
        [0, 0, 0]
    ]
