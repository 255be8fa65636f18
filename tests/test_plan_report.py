"""Programs read from text and traces: loops counted, groups of devices named by mesh axis, operations added up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_post.loops.planned_rollout import rollout_trips
from jaxrl_post.loops.planned_rows import looked_at
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.flash import flash_attention
from jaxrl_post.rollout.decoding import Decoding, sampling_arrays
from jaxrl_post.rollout.schedule import SampleOptions, engine_shape
from jaxrl_post.training.packing import PackShape, empty_batch
from sharding.mesh import make_mesh
from sharding.report import Collective, Program, _groups, count_flops, memory_of
from sharding.targets import CHIPS, parse_target

TEXT = """HloModule jit_run, is_scheduled=true

%layers (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%p), index=1
  %reduced = bf16[4,8]{1,0} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %t = (s32[], bf16[4,8]) tuple(%x, %reduced)
}

%below (p.1: (s32[], bf16[4,8])) -> pred[] {
  %three = s32[] constant(3)
  %p.1 = (s32[], bf16[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  ROOT %lt = pred[] compare(%i, %three), direction=LT
}

%step (p.2: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p.2 = (s32[], bf16[4,8]) parameter(0)
  ROOT %inner = (s32[], bf16[4,8]) while(%p.2), condition=%below, body=%layers
}

%more (p.3: (s32[], bf16[4,8])) -> pred[] {
  %p.3 = (s32[], bf16[4,8]) parameter(0)
  %n = s32[] get-tuple-element(%p.3), index=0
  ROOT %open = pred[] compare(%n, %n), direction=LT
}

ENTRY %main (a: bf16[4,8]) -> bf16[4,64] {
  %a = bf16[4,8]{1,0} parameter(0)
  %start = (s32[], bf16[4,8]) tuple(%a, %a)
  %outer = (s32[], bf16[4,8]) while(%start), condition=%more, body=%step
  %own = bf16[4,8]{1,0} collective-permute(%a), source_target_pairs={{0,0},{1,1},{2,2},{3,3},{4,4},{5,5},{6,6},{7,7}}
  %kernel = f32[2]{0} custom-call(%a), custom_call_target="fused_attention"
  ROOT %gathered = bf16[4,64]{1,0} all-gather(%a), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}
}
"""


def test_an_instruction_counts_as_often_as_its_loops_run_and_its_groups_have_axes():
    """An all-reduce of 64 bytes between two devices sends 64; three layers, five steps. A gather sends its part, and
    what a device sends to itself is not told."""
    program = Program(TEXT, trips=[5])
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, jax.devices())
    assert program.collectives(mesh) == [
        Collective("all-reduce", ("tensor",), 15, 15 * 64, 15 * 64.0),
        Collective("all-gather", ("fsdp",), 1, 512, 384.0),
    ]
    assert program.kernels() == {"fused_attention": 1}
    named = TEXT.replace(
        '"fused_attention"', '"some.compiler", metadata={op_name="jit(f)/transpose(jvp(own))/pallas_call"}'
    )
    assert Program(named).kernels() == {"own": 1}
    assert Program(TEXT, trips=[0]).collectives(mesh)[0].kind == "all-gather"


def test_groups_of_devices_are_read_in_each_form_they_are_written_in():
    """Eight devices, fsdp 4 × tensor 2: pairs along tensor are neighbours, fours along fsdp are every other one."""
    pairs, fours = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]
    for text, groups in {
        "replica_groups={{0,1},{2,3},{4,5},{6,7}}, x": pairs,
        "replica_groups=[4,2]<=[8], x": pairs,
        "replica_groups=[2,4]<=[4,2]T(1,0), x": fours,
        "replica_groups=mesh['a'=4,'b'=2] {'a'}, x": fours,
        "replica_groups=mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'c'}, x": fours,
        "replica_groups=mesh['a'=8] {'a':(4)2}, x": pairs,
        "replica_groups={}, x": [list(range(8))],
    }.items():
        assert _groups(text, 8).tolist() == groups, text
    with pytest.raises(ValueError, match="cannot be read"):
        _groups("replica_groups=anything", 8)


def test_what_xla_writes_is_read_on_the_cpu():
    """A matrix cut over fsdp and used whole is gathered; its bytes are the whole matrix."""
    mesh = make_mesh({"fsdp": 8}, jax.devices())
    cut, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())

    def run(w, x):
        step = lambda x, _: (lax.with_sharding_constraint(x @ lax.with_sharding_constraint(w, whole), whole), None)
        return lax.scan(step, x, None, length=6)[0]

    w, x = (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=s) for s in (cut, whole))
    traced = jax.jit(run).trace(w, x)
    compiled = traced.lower().compile()
    (gather,) = Program(compiled.as_text()).collectives(mesh)
    assert (gather.kind, gather.axes, gather.bytes // gather.count) == ("all-gather", ("fsdp",), 64 * 64 * 4)
    assert memory_of(compiled).arguments == 64 * 8 * 4 + 64 * 64 * 4
    assert count_flops(traced.jaxpr) == 6 * 2 * 64**3


def test_operations_of_loops_branches_replicas_and_gradients():
    square, mesh = jnp.ones((8, 8)), make_mesh({"fsdp": 4}, jax.devices()[:4])
    product = 2 * 8**3

    def loop(x, n):
        layers = lambda x: lax.scan(lambda x, _: (x @ square, None), x, None, length=3)[0]
        x = lax.while_loop(lambda c: c[1] < n, lambda c: (layers(c[0]), c[1] + 1), (x, 0))[0]
        return lax.cond(n > 3, lambda x: x @ square @ square, lambda x: x, x)

    assert count_flops(jax.jit(loop).trace(square, 4).jaxpr, trips=[7]) == (7 * 3 + 2) * product
    spec = PartitionSpec("fsdp")
    each = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"fsdp"})
    assert count_flops(jax.jit(each).trace(jnp.ones((8, 8))).jaxpr) == 4 * 2 * 2 * 2 * 8
    loss = jax.grad(lambda w: jax.checkpoint(lambda w: jnp.sin(w @ square) @ square)(w).sum())
    assert count_flops(jax.jit(loss).trace(square).jaxpr) == pytest.approx(5 * product, abs=product)


def test_targets_are_a_chip_and_its_numbers_or_an_error_that_says_what_to_write():
    assert parse_target("h200:2x8").sizes == (2, 8)
    assert parse_target("v5p:8x8x16").chip is CHIPS["v5p"]
    assert parse_target("h100:4x8").per_link == 8
    for text, part in {
        "h300:1x8": "Did you mean h200",
        "v5e:4x4x4": "a torus of 2 axes",
        "h200:8": "hosts x GPUs",
        "v5p:": "a torus of 3 axes",
    }.items():
        with pytest.raises(ValueError, match=part) as caught:
            parse_target(text)
        assert text in str(caught.value)


def test_flash_attention_counts_the_blocks_that_its_rows_make_it_visit():
    """A row of 128 of which 64 are one sample and 32 + 32 two: blocks of 16, so 10 of 64 pairs and twice 3 of 64, of
    the 32 that all pairs on one side are; what kernels say of themselves is that half."""
    segments = np.repeat([1, 2, 3], [64, 32, 32]).astype(np.int32)[None, None]
    rows = empty_batch(PackShape(1, 128, 128, 1, 1))._replace(segments=segments)
    model = dataclasses.replace(MODEL, attention="flash", platform="cpu")
    shares = looked_at(rows, model)
    assert shares == dict.fromkeys(("flash_attend", "flash_grad_queries", "flash_grad_keys"), (10 + 2 * 3) / 32)
    assert looked_at(rows, MODEL) == {}
    q, k, ids = jnp.ones((1, 128, 4, 16)), jnp.ones((1, 128, 2, 16)), jnp.asarray(segments[0])
    loss = lambda q: flash_attention(q, k, k, ids, ids, "cpu").sum()
    jaxpr = jax.jit(jax.grad(loss)).trace(q).jaxpr
    half = 2 * 4 * 128**2 * 16 / 2
    assert count_flops(jaxpr) == (2 + 3 + 4) * half
    assert count_flops(jaxpr, shares=shares) == (2 + 3 + 4) * half * 16 / 32


MODEL = ModelConfig("qwen3", 98, 32, 64, 3, 4, 2, 16)


def shape_of(slots, attention="xla"):
    options = SampleOptions(4, 40, slots=slots, refill=None if slots is None else slots, attention=attention)
    sampling = sampling_arrays([Decoding()] * 64, (), ())
    return engine_shape(16, options, 8, sampling, MODEL, 1e12, "gpu")


def test_the_loops_of_a_rollout_run_as_often_as_full_length_samples_make_them():
    """All 64 at once decode 40 steps in three tiers, or in one loop where a kernel reads what it needs; 16 slots take
    four waves, the last of them outside the filling."""
    for attention, loops in (("xla", [1, 10, 10, 20]), ("triton", [1, 40])):
        together = rollout_trips(shape_of(None, attention), 16)
        assert together[: len(loops)] == loops
        assert not any(together[len(loops) :])
    fills, inner, *last = rollout_trips(shape_of(16), 16)
    assert (fills, fills * inner, sum(last)) == (4, 120, 40)
