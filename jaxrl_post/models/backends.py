"""Attention of packed rows by name: which backend runs, what it cannot do, and how it runs on a mesh.

`xla` is `attention.packed_attention`, which XLA compiles for anything. `flash` are kernels of our own, for GPUs and
TPUs, interpreted on a CPU. `cudnn` is NVIDIA's, which is handed the mask as an array [B, 1, T, T]. All honour one rule
of who sees whom, `attention.sees`; what a backend cannot do is refused here by its name.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import next_power_of_2
from jax.sharding import PartitionSpec

from jaxrl_post.models import sequence
from jaxrl_post.models.attention import Columns, packed_attention, visible
from jaxrl_post.models.config import Backend, ModelConfig
from jaxrl_post.models.flash import flash_attention
from jaxrl_post.models.flash_grid import TPU_WHOLE, Platform, whole_bytes
from jaxrl_post.models.placement import TENSOR, Placement
from jaxrl_post.models.sequence import Attention

CUDNN_WIDEST = 128  # a head; 256 on Hopper alone
GPU_WIDEST = 512  # bytes of a head in a block of flash; 1024 take 256 KiB of the 227 that an H200 has


def choose(asked: Literal["auto"] | Backend, model: ModelConfig, platform: Platform, ring: bool) -> Backend:
    """The backend of a model on a platform; `ring`: rows are cut over devices whose attention is a ring.

    `auto` is flash where it runs as kernels and can serve, in bfloat16: float32 products are exact in it, and slow.

    Raises: ValueError for a backend asked for that cannot serve.
    """
    if asked == "auto":
        compiled = platform != "cpu" and model.dtype == "bfloat16"
        return "flash" if compiled and not _obstacle("flash", model, platform, ring) else "xla"
    if reason := _obstacle(asked, model, platform, ring):
        raise ValueError(f"model.attention={asked}: {reason}")
    return asked


def _obstacle(backend: Backend, model: ModelConfig, platform: Platform, ring: bool) -> str | None:
    """Why it cannot serve, and what to set instead."""
    if ring and backend != "xla":
        return (
            "a ring computes attention itself, block by block: set training.sequence_attention=ulysses, or "
            "model.attention=xla"
        )
    match backend:
        case "flash":
            return _too_wide(model) if platform == "gpu" else None
        case "cudnn":
            return _obstacle_to_cudnn(model, platform)
    return None


def _too_wide(model: ModelConfig) -> str | None:
    width = next_power_of_2(model.head_dim) * jnp.dtype(model.dtype).itemsize
    if width <= GPU_WIDEST:
        return None
    return (
        f"a GPU's shared memory holds blocks of heads up to {GPU_WIDEST} bytes wide, and this model's are "
        f"{model.head_dim} × {model.dtype}, {width} bytes: take auto or xla"
    )


def _obstacle_to_cudnn(model: ModelConfig, platform: Platform) -> str | None:
    if platform != "gpu":
        return f"cuDNN runs on NVIDIA's GPUs, and these devices are a {platform}'s: take auto, flash or xla"
    if model.dtype != "bfloat16":
        return f"cuDNN's attention is bfloat16, and model.dtype={model.dtype}: set model.dtype=bfloat16, or take xla"
    if model.head_dim % 8 or model.head_dim > CUDNN_WIDEST:
        return (
            f"cuDNN's heads are multiples of 8 up to {CUDNN_WIDEST} wide, and this model's are {model.head_dim}: take "
            "auto, flash or xla"
        )
    return None


def longest_row(model: ModelConfig) -> float:
    """The most columns of a row that the model's backend takes."""
    if model.attention != "flash" or model.platform != "tpu":
        return math.inf
    return TPU_WHOLE // whole_bytes(1, model.head_dim, jnp.dtype(model.dtype).itemsize)


def check_length(model: ModelConfig, T: int) -> None:
    """Raises: ValueError for rows of T columns that the model's backend cannot take."""
    if (most := longest_row(model)) < T:
        raise ValueError(
            f"rows of {T} positions do not fit the memory of a TPU's core with model.attention=flash, at most {most} "
            "do: set model.attention=xla, shorten rows, or cut them over mesh.sequence"
        )
    if model.attention == "cudnn" and T % 2:
        raise ValueError(
            f"rows of {T} positions are odd, and model.attention=cudnn learns from even ones: set training.row_length "
            f"to {T + 1}, or model.attention=flash"
        )


def attention(model: ModelConfig, place: Placement) -> Attention:
    """`attention.packed_attention` by the model's backend: (q, k, v, segments, branches) to the attended values.

    A kernel is one device's affair, so that on a mesh each runs its own rows and heads; XLA cuts its own by itself.
    Where time is cut, in a program that is manual over `sequence`, a ring or an exchange is each device's affair too:
    left to the compiler, rows would move between the devices that batch axes cut, in every layer.
    """
    run = _of_device(model)
    if place.parts > 1:
        return on_mesh(sequence.attention(model.sequence_attention, run), place.within())
    return run if model.attention == "xla" else on_mesh(run, place)


def _of_device(model: ModelConfig) -> Attention:
    match model.attention:
        case "xla":
            stacked = model.scan_layers and model.remat == "none"  # the weights of all layers, were they kept
            return functools.partial(packed_attention, keep=not stacked)
        case "flash":
            return lambda *rows: flash_attention(*rows, model.platform)
        case "cudnn":
            return cudnn_attention


def cudnn_attention(
    q_BTHN: jax.Array, k_BTKN: jax.Array, v_BTKN: jax.Array, segments_BT: jax.Array, branches_BT: jax.Array
) -> jax.Array:
    """cuDNN's flash attention. It makes a gradient to the mask, too, which nobody asks for.

    Raises: ValueError when cuDNN is not installed.
    """
    columns = Columns(jnp.arange(q_BTHN.shape[1]), segments_BT, branches_BT)
    mask_BTT = visible(columns, columns)
    try:
        out = jax.nn.dot_product_attention(q_BTHN, k_BTKN, v_BTKN, mask=mask_BTT[:, None], implementation="cudnn")
    except (AttributeError, RuntimeError) as error:
        raise ValueError(
            "model.attention=cudnn needs cuDNN: pip install nvidia-cudnn-cu13, or take model.attention=flash"
        ) from error
    return jnp.where(mask_BTT.any(-1)[:, :, None, None], out, jnp.zeros_like(out))


def on_mesh(run: Attention, place: Placement) -> Attention:
    """Each device's rows are as they are placed, and its heads as `tensor` cuts them."""
    if place.rows is None:
        return run
    mesh, rows = place.rows.mesh, place.rows.spec[:1]  # an AbstractMesh inside a program that is manual over other axes
    heads = PartitionSpec(*(rows or (None,)), None, TENSOR)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(heads, heads, heads, PartitionSpec(*rows), PartitionSpec(*rows)),
        out_specs=heads,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )
