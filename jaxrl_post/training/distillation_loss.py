"""Divergences between students and teachers on packed rows, a chunk of targets at a time, and the loss of them.

Legend: B rows, T positions and M targets of a row, C targets of a chunk, V vocabulary, K the teacher's top tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxrl_post.config_distillation import Distillation, Divergence
from jaxrl_post.models.decoder import Decoder, scores
from jaxrl_post.models.placement import Placement
from jaxrl_post.objectives import distillation
from jaxrl_post.objectives.reductions import live, weighted_sum
from jaxrl_post.training.logprobs import at_targets, in_chunks, on_own_rows, target_stats
from jaxrl_post.training.loss import Scalars, Tally, regularizers, tally
from jaxrl_post.types import TaughtBatch, TeacherView, TrainBatch

Tree = Any
# (student's and teacher's logits [B, C, V], mask [B, C]) -> divergence and statistics, each [B, C]
Measure = Callable[[jax.Array, jax.Array, jax.Array], Scalars]
# (student's params, one tree for each teacher, micro-batch) -> logp, entropy, divergence, statistics, each [B, M]
TaughtForward = Callable[[Tree, Sequence[Tree], TaughtBatch], Scalars]
TaughtLoss = Callable[[Scalars, TrainBatch], tuple[jax.Array, Tally]]
MEASURED = "distillation/"


def taught_forward(
    student: nnx.GraphDef,
    teachers: Sequence[nnx.GraphDef],
    options: Divergence,
    *,
    temperature: float,
    chunk: int,
    place: Placement,
    entropy_gradient: bool = False,
) -> TaughtForward:
    """Everything a loss may read of each target, float32 [B, M], 0 at dead ones: `logp`, `entropy` (as
    `training.logprobs`), `divergence`, and without gradient the statistics of `divergence_of`.

    A teacher whose params are () is the student as it is, a constant. A teacher reads the micro-batches that have a
    target of its own, and of those its targets' logits.
    """
    measure = divergence_of(options, temperature)

    def forward(params: Tree, weights: Sequence[Tree], batch: TaughtBatch) -> Scalars:
        rows, view = batch
        decoder, part = nnx.merge(student, params), -(-chunk // place.parts)
        scorer_VD = decoder.scorer().astype(jnp.float32)
        x_BTD = decoder.hidden(rows.tokens, rows.positions, rows.segments, rows.branches, place)

        def run(
            scorers: tuple[jax.Array, jax.Array],
            hidden: tuple[jax.Array, jax.Array],
            source_BM: jax.Array,
            seen_BM: jax.Array,
            target_BM: jax.Array,
            mask_BM: jax.Array,
            live_BM: jax.Array | None,
        ) -> Scalars:
            ours, theirs = (functools.partial(scores, scorer_VD) for scorer_VD in scorers)

            def compute(x_BCD: jax.Array, seen_BCD: jax.Array, target_BC: jax.Array, mask_BC: jax.Array) -> Scalars:
                logits_BCV = ours(x_BCD)
                logp_BC, entropy_BC = target_stats(logits_BCV, target_BC, temperature, entropy_gradient)
                made = measure(logits_BCV, lax.stop_gradient(theirs(seen_BCD)), mask_BC)
                return {"logp": live(logp_BC, mask_BC), "entropy": live(entropy_BC, mask_BC)} | made

            inputs = at_targets(hidden[0], source_BM), at_targets(hidden[1], seen_BM), target_BM
            return in_chunks(compute, inputs, mask_BM, part, live_BM)

        parts = []
        for number, (graphdef, own) in enumerate(zip(teachers, weights, strict=True)):
            mask_BM = rows.mask & (view.teacher == number)
            teacher = nnx.merge(graphdef, lax.stop_gradient(own or params))
            scorers, hidden = (scorer_VD, teacher.scorer()), (x_BTD, _seen(teacher, view, mask_BM, place))
            parts.append(on_own_rows(run, place, scorers, hidden, rows.source, view.source, rows.target, mask_BM))
        return jax.tree.map(lambda *of_each: sum(of_each[1:], of_each[0]), *parts)

    return forward


def _seen(teacher: Decoder, view: TeacherView, mask_BM: jax.Array, place: Placement) -> jax.Array:
    """The teacher's hidden states [B, T, D]; zeros, at no cost, where no target is its own."""
    look = lambda: teacher.hidden(view.tokens, view.positions, view.segments, view.branches, place)
    shape = jax.eval_shape(look)
    return lax.stop_gradient(lax.cond(mask_BM.any(), look, lambda: jnp.zeros(shape.shape, shape.dtype)))


def divergence_of(options: Divergence, temperature: float) -> Measure:
    """The divergence of softmax(z/temperature) of each target, over the vocabulary or the teacher's top tokens.

    With `top_k` come verl's `teacher_mass` and `student_mass` on those tokens and `overlap_ratio`, the share of them
    that are among the student's own k.
    """
    between = _between(options)

    def whole(student_BCV: jax.Array, teacher_BCV: jax.Array, mask_BC: jax.Array) -> Scalars:
        student_BCV, teacher_BCV = _log_softmax(student_BCV, temperature), _log_softmax(teacher_BCV, temperature)
        return {"divergence": between(teacher_BCV, student_BCV, mask_BC)}

    def top(student_BCV: jax.Array, teacher_BCV: jax.Array, mask_BC: jax.Array) -> Scalars:
        k = min(options.top_k or 0, teacher_BCV.shape[-1])
        teacher_BCK, ids_BCK = lax.top_k(_log_softmax(teacher_BCV, temperature), k)
        student_BCK = distillation.at(student_BCV.astype(jnp.float32) / temperature, ids_BCK, mask_BC)
        last_BC1 = lax.top_k(student_BCV, k)[0][..., -1:]  # the least of the student's own k
        own_BCK = jnp.take_along_axis(student_BCV, ids_BCK, axis=-1) >= last_BC1
        stats = {
            "teacher_mass": jnp.exp(teacher_BCK).sum(axis=-1),
            "student_mass": jnp.exp(student_BCK).sum(axis=-1),
            "overlap_ratio": own_BCK.mean(axis=-1, dtype=jnp.float32),
        }
        stats = {name: lax.stop_gradient(live(x_BC, mask_BC)) for name, x_BC in stats.items()}
        if options.tail:
            teacher_BCK, student_BCK = (distillation.with_tail(x, mask_BC) for x in (teacher_BCK, student_BCK))
        return {"divergence": between(teacher_BCK, student_BCK, mask_BC)} | stats

    return whole if options.top_k is None else top


def distillation_loss(algorithm: Distillation) -> TaughtLoss:
    """Σ weight · (divergence + coef · KL to the reference − coef · entropy) over live targets, under verl's names."""
    terms = regularizers(algorithm)

    def loss(made: Scalars, rows: TrainBatch) -> tuple[jax.Array, Tally]:
        made = dict(made)
        logp_BM, entropy_BM = made.pop("logp"), made.pop("entropy")
        total = weighted_sum(made.pop("divergence"), rows.mask, rows.weight)
        totals = {f"{MEASURED}loss": total}
        for term in terms:
            name, coef, value_BM = term(logp_BM, entropy_BM, rows)
            totals[name] = weighted_sum(value_BM, rows.mask, rows.weight)
            total = total + coef * totals[name]
        stats = {f"{MEASURED}{name}": value for name, value in made.items()} | {"actor/entropy": entropy_BM}
        return total, tally(logp_BM, rows, totals, stats)

    return loss


def _between(options: Divergence) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    match options.divergence:
        case "forward_kl":
            return distillation.forward_kl
        case "reverse_kl":
            return distillation.reverse_kl
        case "js":
            return functools.partial(distillation.js_divergence, beta=options.beta or 0.5)


def _log_softmax(logits_BCV: jax.Array, temperature: float) -> jax.Array:
    return jax.nn.log_softmax(logits_BCV.astype(jnp.float32) / temperature, axis=-1)
