"""Rows cut over devices along time (mesh axis `sequence`), and their attention: a ring, or an exchange with heads.

Everything but attention works on columns by themselves, so a decoder runs on its part of each row in a program that is
manual over `sequence` alone; the other axes stay with the compiler.

Ring (arXiv:2310.01889): keys and values go around, a softmax with running maximum and sum takes them in. Of 2s chunks
of a row device i holds chunks i and 2s-1-i (as the zigzag of Megatron-LM and llama3's context parallelism), so that a
causal mask leaves each device two of four products a round instead of all or none. Exchange (Ulysses,
arXiv:2309.14509): all-to-alls give each device all columns of its share of the heads, and back.

s devices along the axis, B rows, T columns of a row, t = T/s of a device, H query and K key/value heads, G = H/K,
N per-head width, m chunks of c queries in half of a device's columns, h = t/2 keys in the other half.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_post.models.attention import NEGATIVE, QUERY_CHUNK, Columns, packed_attention, visible
from jaxrl_post.models.placement import SEQUENCE

Kind = Literal["ring", "ulysses"]
Tree = Any
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def fitting_length(kind: Kind, T: int, s: int) -> int:
    """The shortest row of at least T columns that s devices cut into equal parts, for a ring of two chunks each."""
    parts = 1 if s == 1 else 2 * s if kind == "ring" else s
    return -(-T // parts) * parts


def check_length(kind: Kind, T: int, s: int) -> None:
    """Raises: ValueError when s devices cannot cut a row of T columns, as `fitting_length` says."""
    if (fitting := fitting_length(kind, T, s)) != T:
        raise ValueError(
            f"a row of {T} positions cannot be cut over mesh.sequence={s} with training.sequence_attention={kind}: set "
            f"training.row_length to a multiple of {2 * s if kind == 'ring' else s} (the next is {fitting}), and "
            "training.tokens_per_microbatch to no less"
        )


def choose(asked: Literal["auto", "ring", "ulysses"], heads: int, kv_heads: int, s: int, tensor: int) -> Kind:
    """`auto` is the ring: it computes half of the scores, where an exchange computes those that a causal mask hides.

    Raises: ValueError when heads are to be exchanged and do not divide.
    """
    ways = s * tensor
    if asked == "ulysses" and kv_heads % ways:  # query heads are a multiple of them
        raise ValueError(
            f"training.sequence_attention=ulysses spreads key/value heads over mesh sequence={s} × tensor={tensor} = "
            f"{ways}, and the model has {kv_heads} (and {heads} query heads): take ring, or lower mesh.sequence"
        )
    return "ulysses" if asked == "ulysses" else "ring"


def arrange(kind: Kind, x: jax.Array, axis: int = 1) -> jax.Array:
    """A device's columns in time order to those that it computes."""
    return _swap(x, axis, back=False) if kind == "ring" else x


def restore(kind: Kind, x: jax.Array, axis: int = 1) -> jax.Array:
    """Undoes `arrange`."""
    return _swap(x, axis, back=True) if kind == "ring" else x


def attention(kind: Kind, of_rows: Attention = packed_attention) -> Attention:
    """`packed_attention` of arranged columns; to call in a program that is manual over `sequence`.

    `of_rows` is that of whole rows, which a ring has no use for.
    """
    return ring_attention if kind == "ring" else functools.partial(exchanged_attention, of_rows)


def exchanged_attention(
    of_rows: Attention,
    q_BtHN: jax.Array,
    k_BtKN: jax.Array,
    v_BtKN: jax.Array,
    segments_Bt: jax.Array,
    branches_Bt: jax.Array,
) -> jax.Array:
    """Every device attends over whole rows with each s-th key head and its queries."""
    whole = functools.partial(lax.all_gather, axis_name=SEQUENCE, axis=1, tiled=True)
    q, k, v = (_to_heads(x, k_BtKN.shape[2]) for x in (q_BtHN, k_BtKN, v_BtKN))
    out = of_rows(q, k, v, whole(segments_Bt), whole(branches_Bt))
    return _to_columns(out, k.shape[2])


def _to_heads(x_BtHN: jax.Array, K: int) -> jax.Array:
    """[B, t, H, N] to [B, T, H/s, N]. Key heads are dealt out like cards: a head axis cut over `tensor` stays so."""
    (B, t, H, N), s = x_BtHN.shape, lax.axis_size(SEQUENCE)
    dealt = x_BtHN.reshape(B, t, K // s, s, H // K, N)
    return lax.all_to_all(dealt, SEQUENCE, split_axis=3, concat_axis=1, tiled=True).reshape(B, s * t, H // s, N)


def _to_columns(x_BTHN: jax.Array, K: int) -> jax.Array:
    """Undoes `_to_heads`; K key heads are here."""
    (B, T, H, N), s = x_BTHN.shape, lax.axis_size(SEQUENCE)
    dealt = x_BTHN.reshape(B, T, K, 1, H // K, N)
    return lax.all_to_all(dealt, SEQUENCE, split_axis=1, concat_axis=3, tiled=True).reshape(B, T // s, H * s, N)


class Queries(NamedTuple):
    """q [2, m, B, K, G, c, N] and their columns, each with a leading [2, m]."""

    q: jax.Array
    at: Columns


class Keys(NamedTuple):
    """k and v [2, B, K, h, N] and their columns, each with a leading 2."""

    k: jax.Array
    v: jax.Array
    at: Columns


class Softmax(NamedTuple):
    """Of the keys seen so far, float32: Σ weight · v [..., c, N], and [..., c]: Σ weight, the maximum that weights are
    relative to."""

    value: jax.Array
    total: jax.Array
    top: jax.Array


class Said(NamedTuple):
    """What a block's gradient needs of the whole row: log Σ exp(score) [..., c]; the gradient to the output
    [..., c, N]; its product with the output [..., c]."""

    normal: jax.Array
    grad: jax.Array
    product: jax.Array


@jax.custom_vjp
def ring_attention(
    q_BtHN: jax.Array, k_BtKN: jax.Array, v_BtKN: jax.Array, segments_Bt: jax.Array, branches_Bt: jax.Array
) -> jax.Array:
    """Keys, values and their columns visit every device; scores exist for one block of [c, h] at a time."""
    return _ring_forward(q_BtHN, k_BtKN, v_BtKN, segments_Bt, branches_Bt)[0]


def _ring_forward(*inputs: jax.Array) -> tuple[jax.Array, Tree]:
    queries, keys = _halves(*inputs)
    nothing = jnp.zeros_like(queries.q, jnp.float32)
    start = Softmax(nothing, nothing[..., 0], nothing[..., 0] + NEGATIVE)
    work = lambda queries, keys, seen, _: (lax.map(lambda x: _see(x[0], x[1], keys), (queries, seen)), ())
    seen, _ = _around(work, queries, keys, start, ())
    total = jnp.where(seen.total > 0, seen.total, 1.0)
    out = (seen.value / total[..., None]).astype(inputs[2].dtype)
    normal = jnp.where(seen.total > 0, seen.top + jnp.log(total), 0.0)
    return _joined(out), (inputs, out, normal)


def _ring_backward(kept: Tree, grad_BtHN: jax.Array) -> tuple[Any, ...]:
    """The ring once more; gradients to keys and values travel with them."""
    inputs, out, normal = kept
    queries, keys = _halves(*inputs)
    grad = _stacked(grad_BtHN, inputs[1].shape[2])
    said = Said(normal, grad, (grad.astype(jnp.float32) * out).sum(-1))
    zeros = lambda x: jnp.zeros_like(x, jnp.float32)

    def work(queries: tuple[Queries, Said], keys: Keys, dq: jax.Array, dkv: Tree) -> tuple[jax.Array, Tree]:
        exact = (queries[0].q, keys.k, keys.v)
        grads = jax.grad(_share, argnums=(0, 1, 2))(*(x.astype(jnp.float32) for x in exact), queries, keys)
        return dq + grads[0], jax.tree.map(jnp.add, dkv, grads[1:])

    dq, (dk, dv) = _around(work, (queries, said), keys, zeros(queries.q), (zeros(keys.k), zeros(keys.v)))
    q, k, v = inputs[:3]
    flat = lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[-1]).swapaxes(1, 2)
    return _joined(dq).astype(q.dtype), flat(dk).astype(k.dtype), flat(dv).astype(v.dtype), None, None


ring_attention.defvjp(_ring_forward, _ring_backward)


def _around(work: Callable[..., tuple[Tree, Tree]], queries: Tree, keys: Tree, own: Tree, theirs: Tree) -> Any:
    """`work(queries, keys, own, theirs) -> (own, theirs)` on halves wherever queries may see keys.

    `own` adds up with the queries, `theirs` travels with the keys and comes home. All have a leading 2.
    """
    s, i = lax.axis_size(SEQUENCE), lax.axis_index(SEQUENCE)
    onward = lambda tree: jax.tree.map(lambda x: lax.ppermute(x, SEQUENCE, [(d, (d + 1) % s) for d in range(s)]), tree)

    def pair(keys: Tree, own: Tree, theirs: Tree, a: Any, b: Any) -> tuple[Tree, Tree]:
        half = lambda tree, n: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, n, keepdims=False), tree)
        put = lambda tree, n, new: jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, n, 0), tree, new)
        own_a, theirs_b = work(half(queries, a), half(keys, b), half(own, a), half(theirs, b))
        return put(own, a, own_a), put(theirs, b, theirs_b)

    def turn(carry: Tree, step: jax.Array) -> tuple[Tree, None]:
        keys, own, theirs = carry
        keys, theirs = onward((keys, theirs))
        own, theirs = pair(keys, own, theirs, 1, 0)
        # Of an earlier device the second half comes after all queries here, of a later one both before the second only.
        rest = jnp.where((i - step) % s < i, 0, 1)
        return (keys, *pair(keys, own, theirs, rest, rest)), None

    for a, b in ((0, 0), (1, 0), (1, 1)):
        own, theirs = pair(keys, own, theirs, a, b)
    (_, own, theirs), _ = lax.scan(turn, (keys, own, theirs), jnp.arange(1, s))
    return own, onward(theirs)


def _see(queries: Queries, seen: Softmax, keys: Keys) -> Softmax:
    score, mask = _score(queries.q, keys.k), visible(queries.at, keys.at)[:, None, None]
    top = jnp.maximum(seen.top, jnp.where(mask, score, NEGATIVE).max(-1))
    weight, scale = jnp.where(mask, jnp.exp(score - top[..., None]), 0.0), jnp.exp(seen.top - top)
    value = _product("bkgch,bkhn->bkgcn", weight.astype(keys.v.dtype), keys.v)
    return Softmax(seen.value * scale[..., None] + value, seen.total * scale + weight.sum(-1), top)


def _share(q: jax.Array, k: jax.Array, v: jax.Array, queries: tuple[Queries, Said], keys: Keys) -> jax.Array:
    """A number whose gradients are those of a block: Σ weight · (v · grad − product), the weights' normaliser fixed.

    Its derivative by a score is weight · (v · grad − product), the softmax's; by v, weight · grad. float32 arguments,
    so that sums over blocks are, and products in the dtype of the keys.
    """
    low = keys.k.dtype

    @jax.checkpoint
    def chunk(q: jax.Array, of_chunk: tuple[Queries, Said]) -> jax.Array:
        queries, said = of_chunk
        mask = visible(queries.at, keys.at)[:, None, None]
        relative = _score(q.astype(low), k.astype(low)) - said.normal[..., None]
        weight = jnp.exp(jnp.where(mask, relative, NEGATIVE))  # masked before: the exponential of unseen ones overflows
        toward = _product("bkgcn,bkhn->bkgch", said.grad, v.astype(low))
        return jnp.sum(weight * (toward - said.product[..., None]))

    return lax.map(lambda x: chunk(*x), (q, queries)).sum()


def _score(q: jax.Array, k: jax.Array) -> jax.Array:
    return _product("bkgcn,bkhn->bkgch", q, k) * q.shape[-1] ** -0.5


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _halves(
    q_BtHN: jax.Array, k_BtKN: jax.Array, v_BtKN: jax.Array, segments_Bt: jax.Array, branches_Bt: jax.Array
) -> tuple[Queries, Keys]:
    """A device's arranged columns as two chunks of the row, and the queries of each in chunks of c."""
    (B, t), K, s, i = segments_Bt.shape, k_BtKN.shape[2], lax.axis_size(SEQUENCE), lax.axis_index(SEQUENCE)
    h, c = t // 2, _query_chunk(t // 2)
    column = jnp.stack([i, 2 * s - 1 - i])[:, None] * h + jnp.arange(h)[None]
    halved = lambda x: jnp.moveaxis(x.reshape(B, 2, h, *x.shape[2:]), 1, 0)
    chunked = lambda x: jnp.moveaxis(x.reshape(B, 2, h // c, c), 0, 2)
    at = Columns(column.reshape(2, h // c, c), chunked(segments_Bt), chunked(branches_Bt))
    keys = Keys(
        halved(k_BtKN).swapaxes(2, 3),
        halved(v_BtKN).swapaxes(2, 3),
        Columns(column, halved(segments_Bt), halved(branches_Bt)),
    )
    return Queries(_stacked(q_BtHN, K), at), keys


def _query_chunk(h: int) -> int:
    return h if h % QUERY_CHUNK else QUERY_CHUNK


def _stacked(x_BtHN: jax.Array, K: int) -> jax.Array:
    B, t, H, N = x_BtHN.shape
    c = _query_chunk(t // 2)
    return x_BtHN.reshape(B, 2, -1, c, K, H // K, N).transpose(1, 2, 0, 4, 5, 3, 6)


def _joined(x: jax.Array) -> jax.Array:
    """[2, m, B, K, G, c, N] to [B, t, H, N]."""
    two, m, B, K, G, c, N = x.shape
    return x.transpose(2, 0, 1, 5, 3, 4, 6).reshape(B, two * m * c, K * G, N)


def _swap(x: jax.Array, axis: int, back: bool) -> jax.Array:
    """Chunks (2i, 2i + 1) of a device to (i, 2s-1-i), or back. Each device's two have one even number and one odd, so
    that the even ones are a permutation and so are the odd ones."""
    s, i = lax.axis_size(SEQUENCE), lax.axis_index(SEQUENCE)
    holder = lambda chunk: min(chunk, 2 * s - 1 - chunk)
    routes = [[(d, holder(2 * d + odd)) for d in range(s)] for odd in (0, 1)]
    if back:
        routes = [[(there, here) for here, there in route] for route in routes]
    flip = lambda pair: tuple(jnp.where(i % 2, a, b) for a, b in zip(pair[::-1], pair, strict=True))
    pair = tuple(jnp.split(x, 2, axis))
    pair = flip(pair) if back else pair
    pair = tuple(lax.ppermute(half, SEQUENCE, route) for half, route in zip(pair, routes, strict=True))
    return jnp.concatenate(pair if back else flip(pair), axis)
