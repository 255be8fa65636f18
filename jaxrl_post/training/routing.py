"""Routers in an update: what the loss adds for the balance of their experts, load metrics, and replayed choices.

A position counts as often as it predicts a target, so that nothing here depends on padding, on how rows are packed and
prompts shared, on micro-batches or on devices: all means are over the targets of the whole update, and over the layers.

L layers, A micro-batches, B rows, T positions and M targets of a row, E experts, k of them a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding

from jaxrl_post.config_model import Mixture
from jaxrl_post.models.decoder import Decoder
from jaxrl_post.models.moe import Routing, record_dtype
from jaxrl_post.models.placement import Placement
from jaxrl_post.training.loss import Scalars, Tally, summarize
from jaxrl_post.training.micro_batches import micro
from jaxrl_post.types import RoutedBatch, TrainBatch, Trajectory

Tree = Any
LOAD, CHOICES = "actor/moe/load", "actor/moe/choices"  # [L, E] and k, until they become metrics
DIFFERENT = "rollout_corr/routing_diff_fraction"


class Whole(NamedTuple):
    """Of a whole update: `tokens`, its targets, float32; `load_E` float32, choices of each expert a token and layer,
    which add up to k; None where no loss asks for it."""

    tokens: Any
    load_E: Any


def parts(batch: TrainBatch | RoutedBatch) -> tuple[TrainBatch, jax.Array | None]:
    """Rows and, where they are replayed, choices."""
    return (batch.rows, batch.choices) if isinstance(batch, RoutedBatch) else (batch, None)


def routed(rows: Any, choices: Any) -> Any:
    """The rows with their choices, where they are replayed."""
    return rows if choices is None else RoutedBatch(rows, choices)


def choice_sharding(batch_shardings: TrainBatch) -> NamedSharding:
    """Of choices [A, B, T, L, k]: cut like the tokens."""
    tokens: NamedSharding = batch_shardings.tokens
    return tokens


def routed_rows(
    decoder: Decoder, batch: TrainBatch | RoutedBatch, place: Placement
) -> tuple[jax.Array, Routing | None]:
    """Hidden states [B, T, D] of one micro-batch, along the choices that come with it, and its routing."""
    rows, choices_BTLk = parts(batch)
    choices_LBTk = None if choices_BTLk is None else _by_layer(choices_BTLk)
    return decoder.routed(rows.tokens, rows.positions, rows.segments, rows.branches, place, choices_LBTk)


def _by_layer(choices_BTLk: jax.Array) -> jax.Array:
    return jnp.moveaxis(choices_BTLk, 2, 0)


def target_counts(rows: TrainBatch) -> jax.Array:
    """How many live targets each position predicts, float32 [B, T]."""
    count = lambda source_M, mask_M: jnp.zeros(rows.tokens.shape[1]).at[source_M].add(mask_M.astype(jnp.float32))
    return jax.vmap(count)(rows.source, rows.mask)


def load(choices_LBTk: jax.Array, count_BT: jax.Array, experts: int) -> jax.Array:
    """Choices of each expert by counted positions, float32 [L, E]."""
    chosen_LBTE = jax.nn.one_hot(choices_LBTk, experts, dtype=jnp.float32).sum(axis=3)
    return jnp.einsum("lbte,bt->le", chosen_LBTE, count_BT)


def balance_loss(logits_LBTE: jax.Array, count_BT: jax.Array, whole: Whole) -> jax.Array:
    """This micro-batch's part of E · Σ_e f_e P_e, with f the share of choices and P the mean probability of an expert.

    Switch Transformer's (arXiv:2101.03961, equations 4 to 6) as transformers has it: f adds up to k, and both are means
    over all layers, so that k is its value in balance. f is of the whole update and carries no gradient.
    """
    L, *_, E = logits_LBTE.shape
    sum_E = jnp.einsum("lbte,bt->e", jax.nn.softmax(logits_LBTE, axis=-1), count_BT)
    return E * jnp.sum(lax.stop_gradient(whole.load_E) * sum_E) / (L * whole.tokens)


def z_loss(logits_LBTE: jax.Array, count_BT: jax.Array, whole: Whole) -> jax.Array:
    """This micro-batch's part of the mean square of log Σ exp(logits) (ST-MoE, arXiv:2202.08906, equation 5)."""
    square_LBT = jnp.square(jax.nn.logsumexp(logits_LBTE, axis=-1))
    return jnp.einsum("lbt,bt->", square_LBT, count_BT) / (len(logits_LBTE) * whole.tokens)


def with_router(
    loss: jax.Array, tally: Tally, routing: Routing, batch: TrainBatch | RoutedBatch, whole: Whole, options: Mixture
) -> tuple[jax.Array, Tally]:
    """A micro-batch's loss and tally, and what its routers add to both."""
    rows, replayed = parts(batch)
    count_BT = target_counts(rows)
    E, k = routing.logits.shape[-1], routing.choices.shape[-1]
    totals: Scalars = {}
    sums = {LOAD: load(routing.choices, count_BT, E), CHOICES: k * count_BT.sum()}
    if options.aux_loss_coef:
        totals["actor/moe/aux_loss"] = balance_loss(routing.logits, count_BT, whole)
        loss = loss + options.aux_loss_coef * totals["actor/moe/aux_loss"]
    if options.z_loss_coef:
        totals["actor/moe/z_loss"] = z_loss(routing.logits, count_BT, whole)
        loss = loss + options.z_loss_coef * totals["actor/moe/z_loss"]
    if replayed is not None:
        sums[DIFFERENT] = jnp.einsum("lbt,bt->", different(routing), count_BT) / len(routing.logits)
    added = lax.stop_gradient((totals, sums))
    return loss, tally._replace(totals=tally.totals | added[0], sums=tally.sums | added[1])


def different(routing: Routing) -> jax.Array:
    """The share of each token's k choices that its router would not make now, [L, B, T].

    A choice is its own if fewer than k experts come before it, as `lax.top_k` orders them; for that one all logits are
    gathered, as GPUs' compiler cannot cut it.
    """
    E, k = routing.logits.shape[-1], routing.choices.shape[-1]
    logits, choices = routing.logits[..., None, :], routing.choices[..., None]
    of_choice = jnp.take_along_axis(logits, choices, axis=-1)  # [L, B, T, k, 1]
    earlier = lax.broadcasted_iota(choices.dtype, (*choices.shape[:-1], E), choices.ndim - 1) < choices
    before = (logits > of_choice) | ((logits == of_choice) & earlier)
    return (before.sum(axis=-1) >= k).astype(jnp.float32).mean(axis=-1)


def survey(
    graphdef: nnx.GraphDef, place: Placement, options: Mixture
) -> Callable[[Tree, Any, jax.Array], tuple[Whole]]:
    """(params, batch, n_micro) -> what `with_router` must know of the whole update before its first micro-batch.

    The balance loss multiplies two means of the update, so that a sum over micro-batches needs one of them first: a
    forward pass more, but for choices that are replayed, which are known.
    """

    def look(params: Tree, batch: TrainBatch | RoutedBatch, n_micro: jax.Array) -> tuple[Whole]:
        rows, _ = parts(batch)
        tokens = jnp.maximum(jnp.sum(rows.mask, dtype=jnp.float32), 1.0)
        if not options.aux_loss_coef:
            return (Whole(tokens, None),)
        decoder = nnx.merge(graphdef, params)
        assert decoder.config.moe is not None
        E, L = decoder.config.moe.count, decoder.config.layers

        def add(i: jax.Array, load_E: jax.Array) -> jax.Array:
            part = micro(batch, i)
            rows, choices_BTLk = parts(part)
            if choices_BTLk is None:
                _, routing = routed_rows(decoder, part, place)
                assert routing is not None
                choices_LBTk = routing.choices
            else:
                choices_LBTk = _by_layer(choices_BTLk)
            return load_E + load(choices_LBTk, target_counts(rows), E).sum(axis=0)

        return (Whole(tokens, lax.fori_loop(0, n_micro, add, jnp.zeros(E)) / (L * tokens)),)

    return look


def load_metrics(tally: Tally, moved: Scalars) -> Scalars:
    """Of an update: `loss.summarize`, with the loads of all layers' experts in the place of `LOAD`.

    `actor/moe/`: `max_share` and `min_share`, of a layer's choices, of the busiest and idlest expert; `load_entropy`, 1
    in balance; `max_vio`, the busiest expert's excess over the mean, a mean over layers; `dropped_fraction`, choices
    that reached no expert.
    """
    named = summarize(tally)
    load_LE, choices = named.pop(LOAD), named.pop(CHOICES)
    E = load_LE.shape[1]
    share_LE = load_LE / jnp.maximum(load_LE.sum(axis=1, keepdims=True), 1e-30)
    surprise_LE = jnp.where(share_LE > 0, -jnp.log(jnp.maximum(share_LE, 1e-30)), 0.0)
    loads = {
        "actor/moe/max_share": share_LE.max(),
        "actor/moe/min_share": share_LE.min(),
        "actor/moe/load_entropy": (share_LE * surprise_LE).sum(axis=1).mean() / jnp.log(jnp.float32(max(E, 2))),
        "actor/moe/max_vio": (share_LE.max(axis=1) * E - 1.0).mean(),
        "actor/moe/dropped_fraction": 1.0 - load_LE.sum(axis=1).mean() / jnp.maximum(choices, 1e-30),
    }
    return named | loads | moved


def packed_choices(numbered: TrainBatch, trajectories: Sequence[Trajectory], experts: int) -> np.ndarray:
    """The sampler's choices at the positions of packed rows, `moe.record_dtype` [A, B, T, L, k].

    `numbered` are the rows of these trajectories with each one's number, from 1, in place of its advantage. A target's
    source is the position of the token before it, and a prompt ends at the source of a response's first token.
    """
    known = next(t.choices for t in trajectories if t.choices is not None)
    made = np.zeros((*numbered.tokens.shape, *known.shape[1:]), record_dtype(experts))
    for row in np.ndindex(numbered.tokens.shape[:2]):
        numbers_M = np.where(numbered.mask[row], numbered.advantage[row], 0).astype(int)
        for number in set(numbers_M[numbers_M > 0].tolist()):
            trajectory = trajectories[number - 1]
            source = numbered.source[row][numbers_M == number]
            prompt = np.arange(source[0] + 1 - len(trajectory.prompt_ids), source[0])
            made[row][np.concatenate([prompt, source])] = trajectory.choices
    return made
