import jax
import numpy as np
import pytest

from sharding import AXES, batch_shards, make_mesh, resolve_sizes

ONES = dict.fromkeys(AXES, 1)


@pytest.mark.parametrize(
    ("requested", "want"),
    [
        ({"data": -1, "fsdp": 2}, {"data": 4, "fsdp": 2}),
        ({"fsdp": -1}, {"fsdp": 8}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": 8, "tensor": -1}, {"data": 8}),
    ],
)
def test_sizes_resolve_to_all_devices(requested, want):
    assert resolve_sizes(requested, 8) == ONES | want
    assert list(resolve_sizes(requested, 8)) == list(AXES)


@pytest.mark.parametrize(
    ("requested", "needles"),
    [
        ({"data": 3, "fsdp": 2}, ["data×fsdp", "3×2=6", "8 devices"]),
        ({"data": 2, "fsdp": 2}, ["2×2=4", "8 devices", "allow unused"]),
        ({"data": 4, "fsdp": 4}, ["4×4=16", "8 devices"]),
        ({"data": 16}, ["data=16", "8 devices"]),
        ({}, ["8 devices", "-1"]),
        ({"data": -1, "fsdp": -1}, ["data and fsdp", "-1", "only one"]),
        ({"data": 0}, ["data=0", "positive integer"]),
        ({"tensor": -2}, ["tensor=-2", "positive integer"]),
        ({"tensor": 2.0}, ["tensor=2.0", "positive integer"]),
        ({"tensor": True}, ["tensor=True", "positive integer"]),
        ({"data": -1, "tensor": 3}, ["data=-1", "tensor=3", "8 devices"]),
        ({"data": -1, "tensor": 3, "fsdp": 4}, ["data=-1", "4×3=12", "8 devices"]),
        ({"tensr": 2}, ["'tensr'", "'tensor'", *AXES]),
        ({"model": 8}, ["'model'", *AXES]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(requested, needles):
    with pytest.raises(ValueError, match="mesh") as error:
        resolve_sizes(requested, 8)
    assert [needle for needle in needles if needle not in str(error.value)] == []


def test_too_many_devices_asked_for_is_not_cured_by_allowing_unused_ones():
    with pytest.raises(ValueError, match="4×4=16, have 8 devices") as error:
        resolve_sizes({"data": 4, "fsdp": 4}, 8, allow_unused=True)
    assert "allow" not in str(error.value)
    with pytest.raises(ValueError, match="data=-1 cannot be filled: tensor=16 exceeds 8 devices"):
        resolve_sizes({"data": -1, "tensor": 16}, 8, allow_unused=True)


def test_unused_devices_are_left_only_when_allowed():
    assert resolve_sizes({"data": 2, "fsdp": 2}, 8, allow_unused=True) == ONES | {"data": 2, "fsdp": 2}
    assert resolve_sizes({"data": -1, "fsdp": 3}, 8, allow_unused=True) == ONES | {"data": 2, "fsdp": 3}


def test_mesh_has_five_automatic_axes_and_neighbours_on_the_tensor_axis():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == ONES | {"data": 2, "fsdp": 2, "tensor": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(ids[0, 0, 0, 0], [0, 1])
    np.testing.assert_array_equal(ids.ravel(), np.arange(8))


def test_mesh_takes_the_first_of_the_given_devices():
    devices = jax.devices()[3:6]
    assert list(make_mesh({"fsdp": 2}, devices).devices.flat) == devices[:2]
    with pytest.raises(ValueError, match="fsdp=4, have 3 devices"):
        make_mesh({"fsdp": 4}, devices)


def test_batch_shards_multiply_the_batch_axes_alone():
    assert batch_shards(make_mesh({"data": 2, "fsdp": 2, "tensor": 2})) == 4
    assert batch_shards(make_mesh({"expert": 2, "sequence": 2, "tensor": 2})) == 2
    assert batch_shards(make_mesh({"tensor": 8})) == 1
