"""Tokens sent to the devices along the mesh axis `expert` that hold experts of theirs, and what these add sent back.

A token goes once to each device that holds at least one of its choices, however many those are, and one row comes back,
what that device's experts add to it; the token's own device sums its rows in float32. Everyone knows everyone's
choices, which are few bytes beside a token, so that both ends can tell which rows lie where, and no counts are sent.

Rows travel in boxes, one for each device, with places for all tokens of a device: none can be without one, and so none
is dropped. A transport moves the boxes: `ragged` their filled places (`lax.ragged_all_to_all`), `padded` all of them,
for CPUs, where XLA has no ragged one. Sending and collecting are each other's gradient.

N devices along the axis, X tokens of each, D width, k experts a token of E, P = N·X places in the boxes of a device.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_post.models.config import Dispatch, Experts
from jaxrl_post.models.placement import EXPERT

Asked = Literal["auto", "gather", "all_to_all"]
Transport = Literal["ragged", "padded"]


def share(moe: Experts, devices: int) -> float:
    """Of the other devices along the axis, those a token goes to on average, where all sets of k experts are as likely:
    what an exchange sends of a gather's bytes. 1 - (E - E/N choose k) / (E choose k)."""
    elsewhere = moe.count - moe.count // devices
    return 1.0 - math.comb(elsewhere, moe.per_token) / math.comb(moe.count, moe.per_token)


def choose(asked: Asked, moe: Experts, devices: int, platform: str) -> Dispatch:
    """How tokens come to the experts that other devices hold, of so many along the axis.

    `auto` is the exchange on TPUs where it loads links less: on a ring a row that one device alone wants passes N/4
    links on average, and of a gather one for each device that takes it. On GPUs it is the gather, since others have
    reported gradients that a ragged exchange spoils there, and ours has not run yet; it would send `share` of the
    bytes. An exchange of whole boxes, all that CPUs have, sends no less than a gather.

    Raises: ValueError for an exchange among one.
    """
    if asked == "all_to_all" and devices == 1:
        raise ValueError(
            "model.moe.dispatch=all_to_all: mesh.expert=1, where each device holds all experts and none sends a token: "
            "set mesh.expert larger, or model.moe.dispatch=auto"
        )
    wins = platform == "tpu" and devices > 1 and share(moe, devices) * max(1.0, devices / 4) < 1
    if asked == "gather" or (asked == "auto" and not wins):
        return "gather"
    return "padded" if platform == "cpu" else "ragged"


class Route(NamedTuple):
    """Which rows are in the boxes of a device, int32.

    token [N, X]: whose row is at each place of the box to a device, X where empty. place [N, X]: where each token is in
    it, X where nowhere. arrived [N, X]: as `token`, of the box from a device, with that device's own numbers.
    sent, received [N]: how many places of the boxes to and from a device are filled; those are the first.
    """

    token: jax.Array
    place: jax.Array
    arrived: jax.Array
    sent: jax.Array
    received: jax.Array


def route(choices_NXk: jax.Array, held: int) -> Route:
    """From everyone's choices, where device i holds experts i·held to (i + 1)·held - 1."""
    N, me = len(choices_NXk), lax.axis_index(EXPERT)
    holder_NXk = choices_NXk // held
    leaves_NX = (holder_NXk[me][None] == jnp.arange(N)[:, None, None]).any(axis=-1)
    arrives_NX = (holder_NXk == me).any(axis=-1)
    place_NX = jnp.where(leaves_NX, jnp.cumsum(leaves_NX, axis=1) - 1, leaves_NX.shape[1])
    (token_NX, sent_N), (arrived_NX, received_N) = _packed(leaves_NX), _packed(arrives_NX)
    return Route(token_NX, place_NX.astype(jnp.int32), arrived_NX, sent_N, received_N)


def _packed(chosen_NX: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers of the chosen in each row, in order, then X; and how many they are."""
    X, count_N = chosen_NX.shape[1], chosen_NX.sum(axis=1, dtype=jnp.int32)
    order_NX = jnp.argsort(~chosen_NX, axis=1, stable=True).astype(jnp.int32)
    return jnp.where(jnp.arange(X)[None] < count_N[:, None], order_NX, X), count_N


def of_arrived(route: Route, x_NXk: jax.Array, empty: int) -> jax.Array:
    """What everyone's tokens have, [N, X, k], in the order of the places they arrive at, [P, k]."""
    x_NXk = jnp.take_along_axis(x_NXk, route.arrived[..., None], axis=1, mode="fill", fill_value=empty)
    return x_NXk.reshape(-1, x_NXk.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def send(transport: Transport, route: Route, h_XD: jax.Array) -> jax.Array:
    """A device's tokens [X, D] to whom they go; the rows that arrive here, [P, D], 0 at empty places."""
    rows_PD = jnp.take(h_XD, route.token.reshape(-1), axis=0, mode="fill", fill_value=0)
    return _moved(transport, rows_PD, route.sent, route.received)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def collect(transport: Transport, route: Route, y_PD: jax.Array) -> jax.Array:
    """Rows [P, D] back to whom the tokens at their places are of; the sum of each token's, [X, D]."""
    N, X = route.place.shape
    back_PD = _moved(transport, y_PD, route.received, route.sent)
    at_NX = jnp.where(route.place < X, route.place + X * jnp.arange(N)[:, None], N * X)
    rows_NXD = jnp.take(back_PD, at_NX, axis=0, mode="fill", fill_value=0)
    return rows_NXD.sum(axis=0, dtype=jnp.float32).astype(y_PD.dtype)


def _moved(transport: Transport, boxes_PD: jax.Array, sent_N: jax.Array, received_N: jax.Array) -> jax.Array:
    """The box for each device goes there; those that come from each, with 0 at empty places."""
    if transport == "padded":
        return lax.all_to_all(boxes_PD, EXPERT, 0, 0, tiled=True)
    N = len(sent_N)
    X = len(boxes_PD) // N
    here = jnp.full(N, X * lax.axis_index(EXPERT), jnp.int32)  # where my box lies with everyone
    return lax.ragged_all_to_all(
        boxes_PD,
        jnp.zeros_like(boxes_PD),
        X * jnp.arange(N, dtype=jnp.int32),
        sent_N,
        here,
        received_N,
        axis_name=EXPERT,
    )


def _send_forward(transport: Transport, route: Route, h_XD: jax.Array) -> tuple[jax.Array, Route]:
    return send(transport, route, h_XD), route


def _send_backward(transport: Transport, route: Route, d_PD: jax.Array) -> tuple[None, jax.Array]:
    return None, collect(transport, route, d_PD)


def _collect_forward(transport: Transport, route: Route, y_PD: jax.Array) -> tuple[jax.Array, Route]:
    return collect(transport, route, y_PD), route


def _collect_backward(transport: Transport, route: Route, d_XD: jax.Array) -> tuple[None, jax.Array]:
    return None, send(transport, route, d_XD)


send.defvjp(_send_forward, _send_backward)
collect.defvjp(_collect_forward, _collect_backward)
