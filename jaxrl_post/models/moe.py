"""Mixture of experts (Mixtral, Qwen2-MoE, Qwen3-MoE): a float32 router, products grouped by expert, no token dropped.

A token goes to the k experts that its router scores highest; its output is the sum of theirs, weighted by the router's
probabilities. Tokens are sorted by expert, each expert's in blocks of C rows, and a loop runs as many blocks as there
are: work follows the tokens, whatever their spread (after MegaBlocks, arXiv:2211.15841). On NVIDIA GPUs kernels take
the loop's place (`models.grouped`), on TPUs `lax.ragged_dot`, which elsewhere multiplies every row by every expert.

Where a device holds a part of the experts, the devices along the mesh axis `expert` send tokens to those that hold
experts of theirs and collect what these add (`models.exchange`), or all gather all tokens, each computes what its own
experts add, and a reduce-scatter sums that up. A kernel is one device's affair, so where it holds a part of the
experts' width, `tensor` is an axis of ours too, and what parts add is summed over it.

X tokens of a device, D width, E experts, F their width, k experts a token, R = X·k assignments, C rows of a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_post.models import exchange
from jaxrl_post.models.config import Experts
from jaxrl_post.models.grouped import Run, grouped_swiglu
from jaxrl_post.models.placement import EXPERT, TENSOR, Placement
from jaxrl_post.models.product import product
from sharding.rules import ROLLOUT, TRAIN, partition_spec

Weights = dict[str, jax.Array]
AXES: dict[str, tuple[str | None, ...]] = {
    "router": ("embed", None),
    "expert_gate": ("expert", "embed", "mlp"),
    "expert_up": ("expert", "embed", "mlp"),
    "expert_down": ("expert", "mlp", "embed"),
    "shared_gate": ("embed", "mlp"),
    "shared_up": ("embed", "mlp"),
    "shared_down": ("mlp", "embed"),
    "shared_scale": ("embed", None),
}
KERNELS = ("grouped", "interpreted")  # backends that are, on a GPU or, to be looked at, on a CPU
ROUTED = ("router", "expert_gate", "expert_up", "expert_down")
ROLLOUT_EXPERTS = dataclasses.replace(ROLLOUT, expert=())  # which the engine has cut before
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128


class Routing(NamedTuple):
    """What a router said of each token: logits float32 [..., E], and the experts it went to, int32 [..., k]."""

    logits: Any
    choices: Any


Mixture = Callable[[Weights, jax.Array, jax.Array | None], tuple[jax.Array, Routing]]


def shapes(moe: Experts, D: int) -> dict[str, tuple[int, ...]]:
    """Of a layer's weights, by the names of `AXES`."""
    E, F, S = moe.count, moe.size, moe.shared_size
    routed = {"router": (D, E), "expert_gate": (E, D, F), "expert_up": (E, D, F), "expert_down": (E, F, D)}
    shared = {"shared_gate": (D, S), "shared_up": (D, S), "shared_down": (S, D), "shared_scale": (D, 1)}
    return routed | (shared if S else {})


def record(routing: Routing) -> jax.Array:
    """The choices in the smallest type that numbers the experts, as they are kept for replay."""
    return routing.choices.astype(record_dtype(routing.logits.shape[-1]))


def record_dtype(experts: int) -> Any:
    return jnp.uint8 if experts <= 256 else jnp.uint16


def replica_specs(axes: Any) -> Any:
    """How a program that is manual over the batch axes is handed a decoder's weights, from the tree of their logical
    axes: whole, but for the experts, which stay cut over `expert`."""
    spec = lambda logical: PartitionSpec(*(EXPERT if axis == "expert" else None for axis in logical))
    return jax.tree.map(spec, axes, is_leaf=lambda x: isinstance(x, tuple))


def mixture(moe: Experts, place: Placement) -> Mixture:
    """(a layer's weights, h [B, T, D], choices int [B, T, k] or None) -> outputs [B, T, D] and the routing.

    With choices the tokens go there, and the router's scores only weigh them: gradients flow to it as before
    (arXiv:2510.11370). On rows cut over a mesh each device routes its own tokens. `w["expert_*"]` may hold a part of
    the experts where the caller's program is manual over `expert`.
    """
    routed = _on_mesh(moe, place.rows)

    def run(w: Weights, h_BTD: jax.Array, choices_BTk: jax.Array | None) -> tuple[jax.Array, Routing]:
        y_BTD, routing = routed({name: w[name] for name in ROUTED}, h_BTD, choices_BTk)
        return (y_BTD + _shared(w, h_BTD) if moe.shared_size else y_BTD), routing

    return run


def swiglu(h: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The MLP of one expert, or of every token, [..., D] to [..., D], in h's dtype."""
    return product(jax.nn.silu(product(h, gate)) * product(h, up), down)


def route(
    moe: Experts, router_DE: jax.Array, h_XD: jax.Array, choices_Xk: jax.Array | None = None
) -> tuple[Routing, jax.Array]:
    """Scores and choices, and the gates float32 [X, k] of the chosen; all in float32 whatever h's dtype."""
    exact = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    logits_XE = exact(h_XD.astype(jnp.float32), router_DE.astype(jnp.float32))
    if choices_Xk is None:
        choices_Xk = lax.top_k(lax.stop_gradient(logits_XE), moe.per_token)[1]
    choices_Xk = choices_Xk.astype(jnp.int32)
    gates_Xk = jnp.take_along_axis(jax.nn.softmax(logits_XE, axis=-1), choices_Xk, axis=1)
    if moe.normalized:
        gates_Xk = gates_Xk / gates_Xk.sum(axis=-1, keepdims=True)
    return Routing(logits_XE, choices_Xk), gates_Xk


def _shared(w: Weights, h_BTD: jax.Array) -> jax.Array:
    scale_BT1 = jax.nn.sigmoid(h_BTD @ w["shared_scale"].astype(h_BTD.dtype))
    return scale_BT1 * swiglu(h_BTD, w["shared_gate"], w["shared_up"], w["shared_down"])


def _on_mesh(moe: Experts, placed: NamedSharding | None) -> Mixture:
    """`_routed` of each device's own rows, its weights gathered, where they are cut, but for the experts and the width
    that others hold. Left to the compiler that width would be gathered beside. `placed` None: the rows are whole in the
    caller's program."""
    # An AbstractMesh where an outer program is manual over other axes.
    mesh = placed.mesh if placed else jax.sharding.get_abstract_mesh()
    rows = placed.spec if placed else PartitionSpec()
    manual = set(Placement(placed).axes)
    if mesh.shape.get(TENSOR, 1) > 1:
        manual |= {TENSOR}
    rules = (ROLLOUT if moe.whole else TRAIN) if placed else ROLLOUT_EXPERTS

    def spec(name: str, w: jax.Array) -> PartitionSpec:
        cut = partition_spec(AXES[name], w.shape, rules, mesh, name)
        return PartitionSpec(*(axis if axis in manual else None for axis in cut))

    def run(w: Weights, h_BTD: jax.Array, choices_BTk: jax.Array | None) -> tuple[jax.Array, Routing]:
        specs = {name: spec(name, weight) for name, weight in w.items()}

        def local(w: Weights, *rest: Any) -> tuple[jax.Array, Routing]:
            return _routed(
                moe, {name: _gathered(weight, name, specs[name], rest[0].dtype) for name, weight in w.items()}, *rest
            )

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, rows, rows),
            out_specs=(rows, Routing(rows, rows)),
            axis_names=manual,
            check_vma=False,
        )(w, h_BTD, choices_BTk)

    return run if manual else functools.partial(_routed, moe)


def _gathered(w: jax.Array, name: str, spec: PartitionSpec, dtype: Any) -> jax.Array:
    """Whole but for its experts and their width; experts in the dtype of products, as half the bytes are sent then."""
    for dim, axis in enumerate(spec):
        if axis not in (None, EXPERT, TENSOR):
            w = _gather(axis, dim, w.dtype if name == "router" else dtype, w)
    return w


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(axis: str, dim: int, dtype: Any, w: jax.Array) -> jax.Array:
    """Along a dim, in `dtype`; gradients are summed on the way back in the weights' own."""
    return lax.all_gather(w.astype(dtype), axis, axis=dim, tiled=True)


def _gather_forward(axis: str, dim: int, dtype: Any, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gather(axis, dim, dtype, w), jnp.zeros((), w.dtype)


def _gather_backward(axis: str, dim: int, dtype: Any, of_weights: jax.Array, dw: jax.Array) -> tuple[jax.Array]:
    return (lax.psum_scatter(dw.astype(of_weights.dtype), axis, scatter_dimension=dim, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def _routed(moe: Experts, w: Weights, h_BTD: jax.Array, choices_BTk: jax.Array | None) -> tuple[jax.Array, Routing]:
    flat = lambda x: x.reshape(-1, x.shape[-1])
    h_XD = flat(h_BTD)
    routing, gates_Xk = route(moe, w["router"], h_XD, None if choices_BTk is None else flat(choices_BTk))
    weights = tuple(w[name] for name in ("expert_gate", "expert_up", "expert_down"))
    mix = _mixed if len(weights[0]) == moe.count else _by_gather if moe.dispatch == "gather" else _by_exchange
    y_XD = mix(moe, weights, h_XD, routing.choices, gates_Xk)
    if w["expert_gate"].shape[-1] < moe.size:
        y_XD = lax.psum(y_XD, TENSOR)
    back = lambda x: x.reshape(*h_BTD.shape[:-1], x.shape[-1])
    return back(y_XD), Routing(*map(back, routing))


def _by_gather(
    moe: Experts, weights: tuple[jax.Array, ...], h_XD: jax.Array, choices_Xk: jax.Array, gates_Xk: jax.Array
) -> jax.Array:
    """`_mixed` with the experts of all devices along `expert`: each has everyone's tokens and adds its own to them."""
    everyones = functools.partial(lax.all_gather, axis_name=EXPERT, tiled=True)
    mine_Xk = everyones(choices_Xk) - lax.axis_index(EXPERT) * len(weights[0])
    y_XD = _mixed(moe, weights, everyones(h_XD), mine_Xk, everyones(gates_Xk))
    return lax.psum_scatter(y_XD, EXPERT, scatter_dimension=0, tiled=True)


def _by_exchange(
    moe: Experts, weights: tuple[jax.Array, ...], h_XD: jax.Array, choices_Xk: jax.Array, gates_Xk: jax.Array
) -> jax.Array:
    """`_mixed` with the experts of all devices along `expert`: each has the tokens that chose an expert of its own."""
    assert moe.dispatch != "gather"
    everyones, held = functools.partial(lax.all_gather, axis_name=EXPERT), len(weights[0])
    choices_NXk = everyones(choices_Xk)
    route = exchange.route(choices_NXk, held)
    mine_Pk = exchange.of_arrived(route, choices_NXk, -1) - lax.axis_index(EXPERT) * held
    gates_Pk = exchange.of_arrived(route, everyones(gates_Xk), 0)
    arrived_PD = exchange.send(moe.dispatch, route, h_XD)
    return exchange.collect(moe.dispatch, route, _mixed(moe, weights, arrived_PD, mine_Pk, gates_Pk))


def _mixed(
    moe: Experts, weights: tuple[jax.Array, ...], h_XD: jax.Array, choices_Xk: jax.Array, gates_Xk: jax.Array
) -> jax.Array:
    """Σ gate · expert(h) over the choices that `weights` hold, 0 … E-1; others add nothing."""
    (X, D), E = h_XD.shape, len(weights[0])
    choice_R = choices_Xk.reshape(-1)
    choice_R = jnp.where((choice_R >= 0) & (choice_R < E), choice_R, E)
    if moe.backend == "ragged":
        y_RD = _ragged(weights, h_XD, choice_R)
    else:
        swiglus: Callable[..., jax.Array] = _each_block
        if moe.backend in KERNELS:
            run = Run(rows=len(choice_R) * E // moe.count, interpret=moe.backend == "interpreted")
            swiglus = functools.partial(grouped_swiglu, run=run)
        y_RD = _blocked(swiglus, weights, h_XD, choice_R, block_size(len(choice_R), moe.count))
    y_XkD = y_RD.reshape(X, -1, D)
    return jnp.einsum("xkd,xk->xd", y_XkD.astype(jnp.float32), gates_Xk).astype(h_XD.dtype)


def _ragged(weights: tuple[jax.Array, ...], h_XD: jax.Array, choice_R: jax.Array) -> jax.Array:
    """Each assignment's output [R, D], by ragged products over rows sorted by expert."""
    E, R = len(weights[0]), len(choice_R)
    gate, up, down = (w.astype(h_XD.dtype) for w in weights)
    order_R = jnp.argsort(choice_R, stable=True)
    sizes_E = jnp.bincount(choice_R, length=E + 1)[:E].astype(jnp.int32)
    rows_RD = h_XD[order_R // (R // len(h_XD))]
    hidden_RF = jax.nn.silu(lax.ragged_dot(rows_RD, gate, sizes_E)) * lax.ragged_dot(rows_RD, up, sizes_E)
    y_RD = lax.ragged_dot(hidden_RF, down, sizes_E)
    y_RD = jnp.where((jnp.arange(R) < sizes_E.sum())[:, None], y_RD, 0)  # the rest belong to no expert here
    return jnp.zeros_like(y_RD).at[order_R].set(y_RD)


class Blocks(NamedTuple):
    """Rows sorted by expert, in blocks of C of one expert each. token int32 [n·C]: whose row it is, X where empty;
    expert int32 [n]; used: blocks that have rows; at int32 [R]: where each assignment is, n·C for one of no expert."""

    token: jax.Array
    expert: jax.Array
    used: jax.Array
    at: jax.Array


def blocks_of(choice_R: jax.Array, tokens: int, experts: int, size: int) -> Blocks:
    """The blocks of assignments, k in a row for each token; a choice of `experts` is of none."""
    R = len(choice_R)
    n = R // size + min(experts, R)  # the most there can be
    order_R = jnp.argsort(choice_R, stable=True)
    sorted_R = choice_R[order_R]
    sizes_E = jnp.bincount(choice_R, length=experts + 1)[:experts]
    needed_E = -(-sizes_E // size)
    end_E = jnp.cumsum(needed_E)
    own_R = jnp.minimum(sorted_R, experts - 1)
    rank_R = jnp.arange(R) - (jnp.cumsum(sizes_E) - sizes_E)[own_R]
    place_R = jnp.where(sorted_R < experts, (end_E - needed_E)[own_R] * size + rank_R, n * size)
    token = jnp.full(n * size, tokens).at[place_R].set(order_R // (R // tokens), mode="drop")
    expert = jnp.minimum((jnp.arange(n)[:, None] >= end_E[None]).sum(axis=1), experts - 1)
    return Blocks(token, expert, end_E[-1], jnp.zeros_like(place_R).at[order_R].set(place_R))


def _blocked(
    swiglus: Callable[..., jax.Array], weights: tuple[jax.Array, ...], h_XD: jax.Array, choice_R: jax.Array, size: int
) -> jax.Array:
    """Each assignment's output [R, D], 0 for those of no expert, by blocks of `size` rows."""
    (X, D), E = h_XD.shape, len(weights[0])
    blocks = blocks_of(choice_R, X, E, size)
    rows = jnp.take(h_XD, blocks.token, axis=0, mode="fill", fill_value=0).reshape(len(blocks.expert), -1, D)
    y = swiglus(weights, rows, blocks.expert, blocks.used).reshape(-1, D)
    return jnp.take(y, blocks.at, axis=0, mode="fill", fill_value=0)


def block_size(assignments: int, experts: int) -> int:
    """A quarter of an expert's mean share of rows, within bounds, as a power of two.

    Empty rows cost less so than weights that are read again and again do: within a fifth of the best size on two CPU
    cores for 4 to 64 experts and 64 to 2,048 tokens.
    """
    share = max(1, assignments // experts // 4)
    return min(max(1 << (share - 1).bit_length(), SMALLEST_BLOCK), LARGEST_BLOCK)


@jax.custom_vjp
def _each_block(weights: tuple[jax.Array, ...], rows: jax.Array, expert: jax.Array, used: jax.Array) -> jax.Array:
    """`swiglu` of rows [n, C, D], each block by its expert's weights [E, …]; blocks from `used` on give 0."""

    def body(i: jax.Array, y: jax.Array) -> jax.Array:
        return y.at[i].set(swiglu(rows[i], *(w[expert[i]] for w in weights)))

    return lax.fori_loop(0, used, body, jnp.zeros_like(rows))


def _forward(*inputs: Any) -> tuple[jax.Array, Any]:
    return _each_block(*inputs), inputs


def _backward(inputs: Any, dy: jax.Array) -> tuple[Any, jax.Array, None, None]:
    """A block at a time, so that no [n, D, F] of weight gradients ever exists; what is in between is made again. Sums
    are float32."""
    weights, rows, expert, used = inputs

    def body(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        sums, dx = carry
        _, pull = jax.vjp(swiglu, rows[i], *(w[expert[i]] for w in weights))
        dx_i, *dw = pull(dy[i])
        return tuple(total.at[expert[i]].add(part) for total, part in zip(sums, dw, strict=True)), dx.at[i].set(dx_i)

    zeros = tuple(jnp.zeros(w.shape, jnp.float32) for w in weights), jnp.zeros_like(rows)
    sums, dx = lax.fori_loop(0, used, body, zeros)
    return tuple(total.astype(w.dtype) for total, w in zip(sums, weights, strict=True)), dx, None, None


_each_block.defvjp(_forward, _backward)
