import dataclasses
import logging
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from sharding import ROLLOUT, TRAIN, Rules, bytes_per_device, make_mesh, partition_spec, place, reshard, tree_shardings

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
Q_AXES = ("layers", "embed", "heads", "head_dim")


class Moments(NamedTuple):
    count: object
    mu: object


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("axes", "shape", "train", "rollout"),
    [
        (Q_AXES, (2, 8, 4, 16), P(None, "fsdp", "tensor"), P(None, None, "tensor")),
        (("layers", "heads", "head_dim", "embed"), (2, 4, 16, 8), P(None, "tensor", None, "fsdp"), P(None, "tensor")),
        (("vocab", "embed"), (10, 8), P("tensor", "fsdp"), P("tensor")),
        (("batch", "length"), (8, 5), P(("data", "fsdp")), P(("data", "fsdp"))),
        ((None,), (7,), P(), P()),
        ((), (), P(), P()),
    ],
)
def test_specs_of_the_two_tables(axes, shape, train, rollout):
    mesh = make_mesh(CUBE)
    assert partition_spec(axes, shape, TRAIN, mesh, "x") == train
    assert partition_spec(axes, shape, ROLLOUT, mesh, "x") == rollout


def test_axes_of_size_one_are_dropped_and_cost_no_divisibility():
    mesh = make_mesh({"sequence": 4, "expert": 2})
    assert partition_spec(("batch", "length"), (2, 8), TRAIN, mesh, "x") == P("expert", "sequence")
    assert partition_spec(Q_AXES, (3, 7, 5, 11), TRAIN, mesh, "x") == P()


def test_a_variant_is_one_replace():
    wide = dataclasses.replace(TRAIN, mlp=("tensor", "fsdp"), embed=())
    assert partition_spec(("embed", "mlp"), (6, 8), wide, make_mesh(CUBE), "up") == P(None, ("tensor", "fsdp"))
    assert TRAIN.mlp == ("tensor",)


@pytest.mark.parametrize(
    ("axes", "shape", "rules", "needles"),
    [
        (("vocab", "embed"), (49153, 8), TRAIN, ["dim 0 (vocab)", "49153", "tensor=2", "multiple of 2", "to 1"]),
        (("batch", "length"), (6, 4), TRAIN, ["dim 0 (batch)", "size 6", "data=2 × fsdp=2 = 4", "product to 3"]),
        (("heads", "mlp"), (4, 8), TRAIN, ["dim 0 (heads)", "dim 1 (mlp)", "tensor=2", "rules", "tensor=1"]),
        (("batch", "embed"), (4, 8), TRAIN, ["dim 0 (batch)", "dim 1 (embed)", "fsdp=2"]),
        (("embed", "embed"), (8, 8), TRAIN, ["dim 0 (embed)", "dim 1 (embed)", "fsdp=2"]),
        (("vocab", "embd"), (8, 8), TRAIN, ["dim 1", "'embd'", "'embed'", "kv_heads"]),
        (("vocab",), (8, 8), TRAIN, ["('vocab',)", "1 dims", "(8, 8)", "2"]),
    ],
)
def test_specs_that_cannot_hold_name_array_dim_axes_and_numbers(axes, shape, rules, needles):
    with pytest.raises(ValueError, match=r"^layers/w\b") as error:
        partition_spec(axes, shape, rules, make_mesh(CUBE), "layers/w")
    assert [needle for needle in needles if needle not in str(error.value)] == []


@pytest.mark.parametrize("axes", ["tensor", ["tensor"], ("tenser",), ("tensor", "tensor"), None])
def test_rules_hold_tuples_of_distinct_mesh_axes(axes):
    with pytest.raises(ValueError, match=r"Rules\.embed=.*distinct mesh axes"):
        Rules(embed=axes)


def test_tree_shardings_tell_containers_from_logical_axes():
    mesh = make_mesh(CUBE)
    abstract = {"w": struct(8, 4), "opt": (Moments(struct(), {"w": struct(8, 4)}), [struct(2)])}
    axes = {"w": ("embed", "mlp"), "opt": (Moments((), {"w": ("embed", "mlp")}), [(None,)])}
    got = tree_shardings(axes, abstract, TRAIN, mesh)
    w = NamedSharding(mesh, P("fsdp", "tensor"))
    whole = NamedSharding(mesh, P())
    assert got == {"w": w, "opt": (Moments(whole, {"w": w}), [whole])}


def test_tree_shardings_name_the_leaf_at_fault():
    mesh = make_mesh(CUBE)
    with pytest.raises(ValueError, match=r"layers/gate: dim 1 \(mlp\) of size 7 .* tensor=2"):
        tree_shardings({"layers": {"gate": ("embed", "mlp")}}, {"layers": {"gate": struct(8, 7)}}, TRAIN, mesh)
    with pytest.raises(ValueError, match=r"layers/gate: expected a tuple of logical axes .* 'mlp'"):
        tree_shardings({"layers": {"gate": "mlp"}}, {"layers": {"gate": struct(8)}}, TRAIN, mesh)
    with pytest.raises(ValueError, match="gate"):
        tree_shardings({"gate": ("mlp",)}, {"gate": struct(8), "up": struct(8)}, TRAIN, mesh)


def layouts():
    """Shardings of {w [8, 4], n []} on three layouts, the last on other devices than the first two."""
    axes, abstract = {"w": ("embed", "mlp"), "n": ()}, {"w": struct(8, 4), "n": struct()}
    meshes = [make_mesh(CUBE), make_mesh({"fsdp": 4, "tensor": 2}), make_mesh({"fsdp": 2}, jax.devices()[5:7])]
    return [tree_shardings(axes, abstract, TRAIN, mesh) for mesh in meshes]


def test_place_cuts_host_arrays_and_moves_device_arrays():
    host = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "n": np.int32(3)}
    first, second, third = layouts()
    tree = place(host, first)
    for shardings in (first, second, third):
        tree = place(tree, shardings)
        assert jax.tree.map(lambda x: x.sharding, tree) == shardings
        jax.tree.map(np.testing.assert_array_equal, tree, host)
    assert tree["n"].dtype == np.int32
    shard = place(host, second)["w"].addressable_shards[5]
    np.testing.assert_array_equal(shard.data, host["w"][4:6, 2:4])


def test_placed_arrays_keep_dtype_and_do_not_follow_later_writes_to_the_host():
    mesh = make_mesh({"data": 8})
    memory = np.zeros(8 * 4096 * 2 + 64, np.uint8)
    start = -memory.ctypes.data % 64  # aligned memory is what the CPU backend would use in place
    host = memory[start : start + 8 * 4096 * 2].view(jnp.bfloat16).reshape(8, 4096)
    host[:] = 1
    for spec in (P("data"), P()):
        array = place(host, NamedSharding(mesh, spec))
        host[:] = 2
        assert array.dtype == jnp.bfloat16
        assert float(array.min()) == float(array.max()) == 1
        host[:] = 1


def test_reshard_moves_values_bit_for_bit_and_compiles_once(caplog):
    host = {"w": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), "n": np.float32(1.5)}
    first, second, _ = layouts()
    tree = place(host, first)
    moved = reshard(tree, second)
    assert jax.tree.map(lambda x: x.sharding, moved) == second
    jax.tree.map(np.testing.assert_array_equal, moved, host)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        again = reshard(jax.tree.map(lambda x: x + 0, moved), dict(first))
        compiled = len(re.findall("Compiling", caplog.text))
        reshard(again, dict(second))
        assert len(re.findall("Compiling", caplog.text)) == compiled > 0
    assert jax.tree.map(lambda x: x.sharding, again) == first


def test_reshard_leaves_its_input_alone():
    first, _, _ = layouts()
    tree = place({"w": np.ones((8, 4), np.float32), "n": np.float32(0)}, first)
    moved = reshard(tree, first)
    jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(tree)
    np.testing.assert_array_equal(moved["w"], np.ones((8, 4)))


def test_reshard_refuses_other_devices():
    first, _, third = layouts()
    with pytest.raises(ValueError, match="devices"):
        reshard(place({"w": np.ones((8, 4), np.float32), "n": np.float32(0)}, first), third)


def test_bytes_per_device_against_the_arrays_themselves():
    first, _, _ = layouts()
    abstract = {"w": struct(8, 4), "n": struct(dtype=jnp.bfloat16)}
    report = bytes_per_device(abstract, first)
    assert (report.total, report.per_device) == (8 * 4 * 4 + 2, 2 * 4 * 2 * 4 // 2 + 2)
    tree = place(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), abstract), first)
    assert report.per_device == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    assert [(x.name, x.total, x.per_device) for x in report.leaves] == [("n", 2, 2), ("w", 128, 32)]


def test_bytes_report_is_of_the_fullest_device_and_prints_a_table():
    one, two = jax.devices()[:2]
    shardings = {"a": SingleDeviceSharding(one), "b": SingleDeviceSharding(two), "c": SingleDeviceSharding(two)}
    report = bytes_per_device({"a": struct(1000), "b": struct(1000), "c": struct(10)}, shardings)
    assert (report.total, report.per_device) == (8040, 4040)
    lines = str(report).splitlines()
    assert lines[0].split() == ["array", "shape", "dtype", "spec", "bytes", "bytes/device"]
    assert lines[1].split() == ["a", "(1000,)", "float32", "SingleDeviceSharding", "4,000", "4,000"]
    assert lines[-1].split() == ["total", "8,040", "4,040"]
    assert bytes_per_device({}, {}).per_device == 0
