"""Log-probabilities of target tokens, with logits for a few targets at a time.

Legend: B rows, T positions and M targets of a row, D width, V vocabulary, C chunk of targets, n chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxrl_post.models.decoder import Decoder, scores
from jaxrl_post.models.placement import ANYWHERE, SEQUENCE, Placement
from jaxrl_post.objectives.reductions import live

Tree = Any
WEIGHTLESS = -200.0  # below the greatest score: its exp is 0, and 0 times it is 0, which it is not of −inf


def token_logprobs(
    decoder: Decoder,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segments_BT: jax.Array,
    branches_BT: jax.Array,
    source_BM: jax.Array,
    target_BM: jax.Array,
    mask_BM: jax.Array,
    *,
    temperature: float,
    chunk: int,
    place: Placement = ANYWHERE,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """log softmax(z/temperature) at the targets and the entropy of that distribution, in nats; both float32 [B, M].

    Arguments are the fields of one micro-batch of `types.TrainBatch`. The sampler divides by the same temperature, so
    on policy the ratio to its log-probs is 1. Masked targets give exactly 0 in both and no gradient; the entropy
    carries one only with `entropy_gradient`. `place` is that of `Decoder.hidden`. Raises: ValueError unless
    `temperature` and `chunk` are positive.
    """
    x_BTD = decoder.hidden(tokens_BT, positions_BT, segments_BT, branches_BT, place)
    options = {"temperature": temperature, "entropy_gradient": entropy_gradient}
    return target_logprobs(decoder, x_BTD, source_BM, target_BM, mask_BM, place, chunk=chunk, **options)


def target_logprobs(
    decoder: Decoder,
    x_BTD: jax.Array,
    source_BM: jax.Array,
    target_BM: jax.Array,
    mask_BM: jax.Array,
    place: Placement,
    *,
    chunk: int,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """`token_logprobs` from hidden states; options are those of `chunked_logprobs`."""

    def run(
        scorer_VD: jax.Array,
        x_BTD: jax.Array,
        source_BM: jax.Array,
        target_BM: jax.Array,
        mask_BM: jax.Array,
        live_BM: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        logits, part = functools.partial(scores, scorer_VD), -(-chunk // place.parts)
        x_BMD = at_targets(x_BTD, source_BM)
        return chunked_logprobs(logits, x_BMD, target_BM, mask_BM, chunk=part, live_BM=live_BM, **options)

    return on_own_rows(run, place, decoder.scorer().astype(jnp.float32), x_BTD, source_BM, target_BM, mask_BM)


def on_own_rows(run: Callable[..., Tree], place: Placement, scorers: Tree, hidden: Tree, *fields_BM: jax.Array) -> Tree:
    """`run(scorers, hidden, *fields, live_BM)`, a tree of [B, M], by each device for the rows that it has.

    Scorers are trees of [V, D], hidden of [B, T, D]; the last of the fields is the mask of targets, and `live_BM` those
    whose chunk no device may skip, since all must agree (None: those of the mask).

    So a scorer is gathered once for all chunks and its gradient summed once after them: left to the compiler each
    chunk would do both. Where time is cut over s devices, so are the targets: each takes every s-th, live ones being in
    front, and gathers the states of its rows for them once: of a width of D, about as much as a ring sends in two
    layers.

    Scorers that learn should be float32: their gradients are summed in the dtype of what goes in, and XLA's CPU backend
    aborts on a bfloat16 sum.
    """
    s, axes = place.parts, place.axes
    if place.rows is None or not axes:
        return run(scorers, hidden, *fields_BM, None)
    M, time = fields_BM[-1].shape[1], SEQUENCE if s > 1 else None
    dealt = [jnp.pad(x_BM, ((0, 0), (0, -M % s))).reshape(len(x_BM), -1, s) for x_BM in fields_BM]

    def local(scorers: Tree, hidden: Tree, dealt: list[jax.Array]) -> Tree:
        fields_BM = [x[..., 0] for x in dealt]
        hidden = jax.tree.map(_whole_rows, hidden) if time else hidden
        live_BM = lax.pmax(fields_BM[-1].astype(jnp.int32), axes) > 0
        return jax.tree.map(lambda x: x[..., None], run(scorers, hidden, *fields_BM, live_BM))

    rows = place.rows.spec[0]
    targets = PartitionSpec(rows, None, time)
    said = jax.shard_map(
        local,
        mesh=place.rows.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(rows, time), targets),
        out_specs=targets,
        axis_names=set(axes),
        check_vma=False,
    )(scorers, hidden, dealt)
    return jax.tree.map(lambda x: x.reshape(len(x), -1)[:, :M], said)


def _whole_rows(x_BtD: jax.Array) -> jax.Array:
    """[B, T, D] of columns cut over devices. Sent in float32, since gradients come back as sums (see `on_own_rows`)."""
    return lax.all_gather(x_BtD.astype(jnp.float32), SEQUENCE, axis=1, tiled=True).astype(x_BtD.dtype)


def at_targets(x_BTD: jax.Array, source_BM: jax.Array) -> jax.Array:
    """[B, M, D], from the columns that predict the targets."""
    return jnp.take_along_axis(x_BTD, source_BM[..., None], axis=1, mode="clip")


def chunked_logprobs(
    logits: Callable[[jax.Array], jax.Array],
    x_BMD: jax.Array,
    target_BM: jax.Array,
    mask_BM: jax.Array,
    *,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
    live_BM: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`target_stats` of logits(x), [B, C, V] at a time in both passes; chunks without live targets are not computed.

    `live_BM` says which targets keep a chunk from being skipped, where devices must agree; null is the mask.
    """
    if temperature <= 0 or chunk <= 0:
        raise ValueError(f"temperature={temperature} and chunk={chunk} must both be positive")

    def compute(x_BCD: jax.Array, target_BC: jax.Array, mask_BC: jax.Array) -> tuple[jax.Array, jax.Array]:
        logp_BC, entropy_BC = target_stats(logits(x_BCD), target_BC, temperature, entropy_gradient)
        return live(logp_BC, mask_BC), live(entropy_BC, mask_BC)

    return in_chunks(compute, (x_BMD, target_BM), mask_BM, chunk, live_BM)


def in_chunks(
    compute: Callable[..., Any],
    inputs: tuple[jax.Array, ...],
    mask_BM: jax.Array,
    chunk: int,
    live_BM: jax.Array | None = None,
) -> Any:
    """`compute(*inputs, mask)`, a tree of [B, C], on C = `chunk` targets at a time, as a tree of [B, M].

    What it makes in between lives for one chunk, in the backward pass too, where it is made again if there are several.
    Chunks without live targets, those of the mask unless told otherwise, are not computed and give 0.
    """
    B, M = mask_BM.shape
    live_BM = mask_BM if live_BM is None else live_BM

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, -M % chunk)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)

    def join(x_nBC: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_nBC, 0, 1).reshape(B, -1)[:, :M]

    def skip(*parts: jax.Array) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, *parts))

    if chunk >= M:
        return lax.cond(live_BM.any(), compute, skip, *inputs, mask_BM)

    @jax.checkpoint
    def step(_: None, part: tuple[tuple[jax.Array, ...], jax.Array, jax.Array]) -> tuple[None, Any]:
        inputs_BC, mask_BC, any_live = part
        return None, lax.cond(any_live, compute, skip, *inputs_BC, mask_BC)

    any_n = cut(live_BM).any(axis=(1, 2))
    _, made = lax.scan(step, None, (tuple(map(cut, inputs)), cut(mask_BM), any_n))
    return jax.tree.map(join, made)


def target_stats(
    logits_BCV: jax.Array, target_BC: jax.Array, temperature: float, entropy_gradient: bool = False
) -> tuple[jax.Array, jax.Array]:
    """log softmax(z/temperature)[target] and the entropy in nats, float32 [B, C]; logits may be −inf.

    The entropy is a constant unless `entropy_gradient`: the default's backward pass does not touch it.

    The target is picked by compare and sum: a gather would collect a vocabulary that is cut over devices. One
    exponential of each score serves the sum, the entropy and the backward pass: on a CPU each of these passes over
    [B, C, V] is memory, and an exponential inside a sum runs on one core (benchmarks/update_log.md).
    """
    scaled_BCV = logits_BCV.astype(jnp.float32) / temperature
    below_BCV = scaled_BCV - lax.stop_gradient(scaled_BCV.max(-1, keepdims=True))
    weight_BCV = jnp.exp(below_BCV)
    log_sum_BC = jnp.log(weight_BCV.sum(-1))
    ids_11V = jnp.arange(logits_BCV.shape[-1], dtype=target_BC.dtype)[None, None]
    logp_BC = jnp.where(target_BC[..., None] == ids_11V, below_BCV, 0.0).sum(-1) - log_sum_BC
    terms = (weight_BCV, below_BCV, log_sum_BC)
    weight_BCV, below_BCV, log_sum_BC = terms if entropy_gradient else lax.stop_gradient(terms)
    mean_BC = (weight_BCV * jnp.maximum(below_BCV, WEIGHTLESS)).sum(-1) * jnp.exp(-log_sum_BC)
    return logp_BC, log_sum_BC - mean_BC
