"""What processes of one job tell each other: two real ones, and one alone, which pays nothing."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Decoder, split
from jaxrl_post.models.huggingface_export import save_params
from launch.supervisor import free_port
from sharding import processes

TALK = """
import json, math, sys
from launch.cluster import joined
from launch.rollcall import Place

me = int(sys.argv[2])
with joined(Place(sys.argv[1], me, 2), 60, 60):
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from sharding.mesh import make_mesh
    from sharding.placement import place
    from sharding.processes import (
        PeerError, check_same, exchange, fetch, from_first, is_first, meet, post, posts, share, split_work, together
    )

    said = {"devices": jax.device_count(), "first": is_first()}
    mesh = make_mesh({"data": 2})
    cut, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    host = np.arange(8, dtype=np.float32).reshape(4, 2)
    placed = place((host, host, None), (cut, whole, None))
    said["local"] = np.asarray(placed[0].addressable_shards[0].data).tolist()
    said["fetched"] = jax.tree.map(np.ndarray.tolist, fetch(placed))
    said["exchanged"] = exchange([me, None, "é" * (500 * me), 0.1 + me])
    asked = []
    said["from first"] = from_first(lambda: asked.append(me) or "found")
    said["asked"] = asked
    said["share"] = [[share(n).start, share(n).stop] for n in (0, 1, 5)]
    said["work"] = split_work([3, 1, 4, 1, 5], lambda part: [x * x for x in part])
    said["few"] = split_work([7], lambda part: [x + me for x in part])
    said["nan"] = math.isnan(exchange(math.nan)[1])
    said["together"] = together(lambda: {me}).pop()  # a set is no JSON
    check_same("x", 3)
    meet(make_mesh({"data": 2}))
    said["errors"] = []
    for attempt in (
        lambda: split_work([0, 1], lambda part: [1 // x for x in part]),
        lambda: together(lambda: [][0] if me else 5),
        lambda: together(lambda: split_work([0, 1], lambda part: [1 // x for x in part])),
        lambda: check_same("the seed", me),
    ):
        try:
            attempt()
        except (ValueError, ArithmeticError, LookupError) as error:
            said["errors"].append(f"{type(error).__name__}: {error}")
    post("phase", f"at work {me}")
    exchange(0)
    said["posts"] = posts("phase")
    said["waiting"] = exchange(posts("waiting").get(me))[me]

    from jaxrl_post.models import huggingface
    from jaxrl_post.models.decoder import abstract
    from sharding.placement import tree_shardings
    from sharding.rules import TRAIN

    read, read_part = [], huggingface._read_part

    def counted(*asked):
        part = read_part(*asked)
        read.append(part.size)
        return part

    huggingface._read_part = counted
    config = huggingface.read_config(sys.argv[3])
    _, shapes, axes = abstract(config)
    shardings = tree_shardings(axes, shapes, TRAIN, make_mesh({"fsdp": 2}))
    params = fetch(huggingface.load_params(sys.argv[3], config, shardings))
    said["read"] = sum(read)
    said["weights"] = [leaf.tobytes().hex() for leaf in jax.tree.leaves(params)]
    print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with random weights, and the weights."""
    config = ModelConfig(
        family="llama", vocab_size=48, hidden_size=16, intermediate_size=32, layers=2, heads=2, kv_heads=2, head_dim=8
    )
    params = split(Decoder(config, jax.random.key(0)))[1]
    folder = tmp_path_factory.mktemp("model")
    save_params(folder, params, config)
    return folder, jax.tree.leaves(jax.device_get(params))


@pytest.fixture(scope="module")
def two(model):
    """What each of two processes found."""
    at, environ = f"127.0.0.1:{free_port()}", os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TALK, at, str(i), str(model[0])], env=environ, stdout=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in said]


def test_arrays_in_parts_are_read_whole(two):
    host = np.arange(8.0).reshape(4, 2).tolist()
    assert [said["local"] for said in two] == [host[:2], host[2:]]
    assert all(said["devices"] == 2 and said["fetched"] == [host, host, None] for said in two)


def test_values_of_any_length_reach_all(two):
    assert [said["exchanged"] for said in two] == [[[0, None, "", 0.1], [1, None, "é" * 500, 1.1]]] * 2
    assert all(said["nan"] for said in two)


def test_the_first_alone_is_asked(two):
    assert [said["first"] for said in two] == [True, False]
    assert [said["from first"] for said in two] == ["found"] * 2
    assert [said["asked"] for said in two] == [[0], []]


def test_work_is_divided_and_put_together_in_order(two):
    assert [said["share"] for said in two] == [[[0, 0], [0, 0], [0, 2]], [[0, 0], [0, 1], [2, 5]]]
    assert [said["work"] for said in two] == [[9, 1, 16, 1, 25]] * 2
    assert [said["few"] for said in two] == [[8]] * 2  # the second process did it
    assert [said["together"] for said in two] == [0, 1]


def test_an_error_of_one_is_one_of_all_and_nobody_waits(two):
    first, second = (said["errors"] for said in two)
    assert first[0].startswith("ZeroDivisionError")
    assert second[0].startswith("PeerError: process 0 of 2: ZeroDivisionError")
    assert first[1].startswith("PeerError: process 1 of 2: IndexError")
    assert second[1].startswith("IndexError")
    assert second[2].startswith("PeerError: process 0 of 2: ZeroDivisionError")  # once, though one lies in another
    assert first[3] == second[3]
    assert "the seed must be the same on all 2 processes: 0 on process 0, 1 on process 1" in first[3]


def test_what_a_process_is_doing_can_be_read_by_others(two):
    assert [said["posts"] for said in two] == [{"0": "at work 0", "1": "at work 1"}] * 2
    assert [said["waiting"] for said in two] == [None, None]


def test_each_process_reads_its_own_part_of_the_weights(two, model):
    weights = model[1]
    whole = sum(leaf.size for leaf in weights)
    cut = sum(leaf.size for leaf in weights if leaf.ndim > 2 or leaf.shape[0] == 48)  # all but the norms
    assert [said["read"] for said in two] == [whole - cut // 2] * 2
    assert [said["weights"] for said in two] == [[leaf.tobytes().hex() for leaf in weights]] * 2


def test_one_process_exchanges_with_itself():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    array = jax.device_put(np.arange(8), NamedSharding(mesh, PartitionSpec("data")))
    np.testing.assert_array_equal(processes.fetch(array), np.arange(8))
    marker = object()
    assert processes.exchange(marker) == [marker]  # nothing is encoded
    assert processes.from_first(lambda: marker) is marker
    assert processes.split_work([1, 2], lambda part: [marker] * len(part)) == [marker] * 2
    assert processes.share(5) == slice(0, 5)
    assert processes.posts("phase") == {}
    processes.check_same("x", marker)
