import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from jaxrl_post import checkpoint
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.observe.compiles import CompileCounter
from sharding import TRAIN, make_mesh, place, tree_shardings

HOST = {"step": 7, "data": {"epoch": 1, "order": [3, 1, 2]}, "lr": 1e-6, "note": "π", "none": None}
PARAM_AXES = {"embed": ("vocab", "embed"), "layers": {"up": ("layers", "embed", "mlp"), "norm": ("layers", None)}}


def host_params(seed):
    """Values that expose any change of bits: nan, -0, infinity, subnormals, bfloat16."""
    random = np.random.default_rng(seed)
    up = random.normal(size=(2, 8, 4)).astype(np.float32)
    up[0, 0] = [np.nan, -0.0, np.inf, 1e-42]
    embed = random.normal(size=(16, 8)).astype(jnp.bfloat16)
    return {"embed": embed, "layers": {"up": up, "norm": np.ones((2, 8), np.float32)}}


def shardings(params, sizes, devices=None):
    return tree_shardings(PARAM_AXES, params, TRAIN, make_mesh(sizes, devices))


def train_state(seed, sizes):
    """Params and AdamW state (named tuples, a tuple, empty states, a scalar), moments placed like the params."""
    params = host_params(seed)
    params = place(params, shardings(params, sizes))
    state = jax.tree.map(lambda x: x + 1, optax.adamw(1e-3).init(params))
    return {"params": params, "optimizer": state, "key": jax.random.key_data(jax.random.key(seed))}


def abstract(tree, sharding_tree=None):
    sharding_tree = jax.tree.map(lambda x: x.sharding, tree) if sharding_tree is None else sharding_tree
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, sharding_tree)


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype, np.asarray(x).tobytes()) == (y.shape, y.dtype, np.asarray(y).tobytes())


@pytest.fixture
def checkpointer(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep_last=2)
    yield checkpointer
    checkpointer.close()


@pytest.mark.parametrize("shared", [checkpoint.SHARED_BYTES, 0])
def test_a_train_state_comes_back_bit_for_bit_with_its_host_state(tmp_path, monkeypatch, shared):
    """Also where replicas share the writing of arrays."""
    monkeypatch.setattr(checkpoint, "SHARED_BYTES", shared)
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    state = train_state(0, {"data": 2, "fsdp": 2, "tensor": 2})
    checkpointer.save(3, state, HOST)
    checkpointer.wait()
    got, host = checkpointer.restore(3, abstract(state))
    assert_same_bits(got, state)
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, state)
    assert host == checkpointer.restore_host(3) == HOST
    checkpointer.close()


def test_saving_small_arrays_compiles_nothing(checkpointer):
    state = jax.block_until_ready(train_state(0, {"data": 8}))
    with CompileCounter() as compiles:
        checkpointer.save(1, state, HOST)
        checkpointer.wait()
    assert compiles.collect()["compile/count"] == 0


def test_latest_is_the_newest_step_on_disk_and_old_ones_go(checkpointer, tmp_path):
    assert checkpointer.latest() is None
    for step in (1, 2, 10):
        checkpointer.save(step, {"x": jnp.full(3, step)}, {"step": step})
    checkpointer.wait()
    assert checkpointer.latest() == 10
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["10", "2"]
    reader = Checkpointer(tmp_path / "checkpoints", keep_last=1)
    got, host = reader.restore(2, abstract({"x": jnp.zeros(3, int)}))
    np.testing.assert_array_equal(got["x"], [2, 2, 2])
    assert (reader.latest(), host) == (10, {"step": 2})
    with pytest.raises(ValueError, match=r"step=1: no complete checkpoint .* \[2, 10\]"):
        reader.restore_host(1)
    reader.close()


def test_one_older_step_stays_until_another_takes_its_place(checkpointer, tmp_path):
    kept = []
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5), (7, 5), (8, None)):
        checkpointer.save(step, {"x": jnp.full(3, step)}, {}, keep=best)
        checkpointer.wait()
        kept.append(sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 3, 4], [4, 5], [5, 6], [5, 6, 7], [7, 8]]


# Saves step 1, then step 2 with files limited to 64 KiB, as on a disk that is full: then without the limit.
FULL_DISK = """
    import resource, sys
    import jax, numpy as np
    from jaxrl_post.checkpoint import Checkpointer, SaveError

    checkpointer = Checkpointer(sys.argv[1], keep_last=1)
    tree = lambda step: {"w": jax.random.normal(jax.random.key(step), (512, 512))}
    checkpointer.save(1, tree(1), {"step": 1})
    checkpointer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        checkpointer.save(2, tree(2), {"step": 2})
        checkpointer.wait()
    except SaveError as error:
        print(checkpointer.latest(), str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpointer.save(2, tree(2), {"step": 2})
    checkpointer.close()
    print(checkpointer.latest())
"""


def test_a_full_disk_leaves_the_step_before_and_says_so_in_one_line(tmp_path):
    said, after = run_python(FULL_DISK, tmp_path, devices=1, no_errors="Traceback").splitlines()
    assert said.startswith(f"1 step 2 was not saved in {tmp_path} (")
    assert "File too large" in said
    assert "step 1 is whole, and a restart goes on from it" in said
    assert (after, [path.name for path in tmp_path.iterdir()]) == ("2", ["2"])


@pytest.mark.parametrize("target", ["fsdp and tensor", "one device"])
def test_restore_on_another_mesh_has_the_requested_shardings(checkpointer, target):
    state = train_state(1, {"data": 8})
    checkpointer.save(1, state, {})
    checkpointer.wait()
    if target == "one device":
        wanted = jax.tree.map(lambda x: SingleDeviceSharding(jax.devices()[6]), state["params"])
    else:
        wanted = shardings(state["params"], {"fsdp": 4, "tensor": 2})
    got, _ = checkpointer.restore(1, {"params": abstract(state["params"], wanted)}, partial=True)
    assert_same_bits(got["params"], state["params"])
    assert jax.tree.map(lambda x: x.sharding, got["params"]) == wanted
    if target != "one device":
        assert got["params"]["layers"]["up"].addressable_shards[0].data.shape == (2, 2, 2)


def test_restore_on_fewer_devices_than_saved(checkpointer, tmp_path):
    state = train_state(2, {"fsdp": 4, "tensor": 2})
    checkpointer.save(1, {"params": state["params"]}, HOST)
    checkpointer.wait()
    code = """
        import sys, jax, numpy as np
        from jaxrl_post.checkpoint import Checkpointer
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = {"params": {"embed": jax.ShapeDtypeStruct((16, 8), jax.numpy.bfloat16, sharding=one), "layers": {
            name: jax.ShapeDtypeStruct(shape, np.float32, sharding=one)
            for name, shape in {"up": (2, 8, 4), "norm": (2, 8)}.items()}}}
        got, host = Checkpointer(sys.argv[1], 1).restore(1, wanted)
        print(jax.device_count(), host["note"], b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(got)).hex())
    """
    count, note, bits = run_python(code, tmp_path / "checkpoints", devices=1).split()
    assert (count, note) == ("1", HOST["note"])
    assert bytes.fromhex(bits) == b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state["params"]))


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=9)
    mesh = make_mesh({"data": 8})
    layout = tree_shardings({"w": ("batch", None), "n": (None,)}, struct_pair(), TRAIN, mesh)
    tree = place({"w": np.zeros((8, 1 << 18), np.float32), "n": np.zeros(1 << 18, np.float32)}, layout)
    overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    for step in range(4):
        checkpointer.save(step, tree, {})
        for _ in range(3):
            tree = overwrite(tree)
        jax.block_until_ready(tree)
    checkpointer.wait()
    for step in range(4):
        got, _ = checkpointer.restore(step, abstract(tree, layout))
        assert {float(f(x)) for x in got.values() for f in (jnp.min, jnp.max)} == {3.0 * step}
    checkpointer.close()


def struct_pair():
    return {"w": jax.ShapeDtypeStruct((8, 1 << 18), np.float32), "n": jax.ShapeDtypeStruct((1 << 18,), np.float32)}


def test_restoring_another_tree_names_path_and_both_shapes(checkpointer):
    saved = {"params": {"up": jnp.zeros((2, 4)), "down": jnp.zeros((4, 2))}, "optimizer": {"mu": jnp.zeros(3)}}
    checkpointer.save(1, saved, {})
    checkpointer.wait()
    wanted = abstract(saved)
    params = wanted["params"]
    whole = params["up"].sharding
    struct = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def refused(tree, match, partial=False):
        with pytest.raises(ValueError, match=match):
            checkpointer.restore(1, tree, partial)

    other_shape = {**wanted, "params": {**params, "up": struct(2, 5)}}
    refused(other_shape, r"params/up is \(2, 4\) float32 in the checkpoint, \(2, 5\) float32 was asked for")
    other_dtype = {**wanted, "params": {**params, "up": struct(2, 4, dtype=jnp.bfloat16)}}
    refused(other_dtype, r"params/up is \(2, 4\) float32 in the checkpoint, \(2, 4\) bfloat16 was asked for")
    refused({**wanted, "params": {**params, "gate": struct(2)}}, r"params/gate \(2,\) is not in the checkpoint")
    refused({"params": params}, r"optimizer/mu \(3,\) is only in the checkpoint")
    refused({"params": {"up": params["up"]}}, r"params/down \(4, 2\) is only in the checkpoint", partial=True)
    refused({**wanted, "params": {**params, "up": jax.ShapeDtypeStruct((2, 4), jnp.float32)}}, "params/up: no sharding")
    got, _ = checkpointer.restore(1, {"params": params}, partial=True)
    assert_same_bits(got, {"params": saved["params"]})


@pytest.mark.parametrize(
    ("step", "arrays", "host", "match"),
    [
        (6, {"a": {"x": np.ones(2)}}, {}, "a/x: expected a jax array, got ndarray"),
        (6, {"a": {"x": 3}}, {}, "a/x: expected a jax array, got int"),
        (6, {"a": lambda: jax.random.key(0)}, {}, "a: dtype key<fry>; save jax.random.key_data"),
        (6, {"a": lambda: jnp.zeros((0, 3))}, {}, r"a: the array is empty, shape \(0, 3\)"),
        (6, {"a": lambda: donated()}, {}, r"a: the array was deleted \(donated\)"),
        (6, {}, {}, "expected a tree of arrays with distinct paths, got 0 leaves"),
        (6, {"a/b": lambda: jnp.ones(1), "a": {"b": lambda: jnp.ones(1)}}, {}, "distinct paths, got 2 leaves"),
        (6, None, {"x": {1, 2}}, r"host\.x=\{1, 2\}: expected null, a string"),
        (6, None, {"eval": [{"loss": float("nan")}]}, r"host\.eval\.0\.loss=nan: .* finite number"),
        (6, None, {"data": {1: "a"}}, r"host\.data=\{1: 'a'\}: .* string keys"),
        (6, None, {"ids": (1, 2)}, r"host\.ids=\(1, 2\): .* list"),
        (6, None, {"count": np.int64(1)}, r"host\.count=np\.int64\(1\)"),
        (6, None, [1, 2], r"host=\[1, 2\]: expected a dict"),
        (5, None, {}, "step=5: must be above the newest saved step, 5"),
        (4, None, {}, "step=4: must be above the newest saved step, 5"),
    ],
)
def test_bad_input_saves_nothing(checkpointer, tmp_path, step, arrays, host, match):
    checkpointer.save(5, {"x": jnp.arange(3)}, {"ok": True})
    checkpointer.wait()
    arrays = {"x": jnp.zeros(3, int)} if arrays is None else jax.tree.map(lambda x: x() if callable(x) else x, arrays)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=match):
        checkpointer.save(step, arrays, host)
    checkpointer.wait()
    assert snapshot(tmp_path) == before
    assert checkpointer.latest() == 5


def donated():
    x = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    return x


def snapshot(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in Path(folder).rglob("*")}


def test_a_folder_keeps_at_least_one(tmp_path):
    with pytest.raises(ValueError, match="keep_last=0"):
        Checkpointer(tmp_path, keep_last=0)


def test_a_failed_background_write_is_raised_and_never_latest(checkpointer, monkeypatch):
    tree = {"x": jnp.arange(4)}
    checkpointer.save(1, tree, {})
    checkpointer.wait()
    rename = os.rename

    def full_disk(source, target, **options):
        if os.fspath(target).endswith("/2"):
            raise OSError("no space left")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", full_disk)
    checkpointer.save(2, tree, {})
    with pytest.raises(OSError, match="no space left"):
        checkpointer.wait()
    assert checkpointer.latest() == 1
    monkeypatch.undo()
    checkpointer.save(2, {"x": jnp.arange(4) + 1}, {})
    checkpointer.wait()
    assert checkpointer.latest() == 2
    np.testing.assert_array_equal(checkpointer.restore(2, abstract(tree))[0]["x"], [1, 2, 3, 4])


def test_leftovers_of_a_killed_save_are_ignored_with_a_log_line_and_replaced(tmp_path, caplog):
    writer = Checkpointer(tmp_path, keep_last=3)
    writer.save(1, {"x": jnp.arange(4)}, {})
    writer.close()
    torn = {"2.orbax-checkpoint-tmp": "arrays", "3.orbax-checkpoint-tmp-17": "host", "4": "arrays"}
    for name, item in torn.items():
        (tmp_path / name / item).mkdir(parents=True)
        (tmp_path / name / item / "junk").write_text("torn")
    others = {"7.txt": "mine", "notes": "mine"}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    checkpointer = Checkpointer(tmp_path, keep_last=3)
    with caplog.at_level(logging.WARNING, "jaxrl_post.checkpoint"):
        assert checkpointer.latest() == 1
        assert [name for name in torn if f"ignoring {tmp_path / name}:" not in caplog.text] == []
        assert "7.txt" not in caplog.text
    with pytest.raises(ValueError, match="step=4: no complete checkpoint"):
        checkpointer.restore_host(4)
    assert {path.name for path in tmp_path.iterdir()} == {"1", *torn, *others}, "reading must not clean up"
    for step in (2, 4):
        checkpointer.save(step, {"x": jnp.arange(4) * step}, {"step": step})
        checkpointer.wait()
        got, host = checkpointer.restore(step, abstract({"x": jnp.arange(4)}))
        np.testing.assert_array_equal(got["x"], np.arange(4) * step)
        assert (checkpointer.latest(), host) == (step, {"step": step})
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "4", *others}
    checkpointer.close()


# Saves step 1, then dies by SIGKILL at the n-th file operation of saving step 2 (and dropping step 1): one forked child
# for each third n, until one lives to the end.
KILLED_SAVES = """
    import itertools, os, signal, sys
    import jax, numpy as np
    from jaxrl_post.checkpoint import Checkpointer

    OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rename", "shutil.rmtree"}

    def die_at(folder, n):
        moments = itertools.count(1)
        def hook(event, arguments):
            if event in OPERATIONS and folder in str(arguments[0]) and next(moments) == n:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)

    def child(folder, n):
        checkpointer = Checkpointer(folder, keep_last=1)
        save = lambda step: checkpointer.save(step, {"w": jax.numpy.full((64, 64), step)}, {"step": step})
        save(1)
        checkpointer.wait()
        die_at(folder, n)
        save(2)
        checkpointer.wait()

    for n in itertools.count(1, 3):
        pid = os.fork()
        if pid == 0:
            child(f"{sys.argv[1]}/{n:02}", n)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        print(status)
        if status != signal.SIGKILL:
            break
"""


def test_killed_anywhere_in_a_save_the_newest_complete_step_remains(tmp_path):
    died = run_python(KILLED_SAVES, tmp_path, devices=1).split()
    assert died == ["9"] * (len(died) - 1) + ["0"]
    assert len(died) > 6
    tree = {"w": jnp.zeros((64, 64), int)}
    newest = []
    for folder in sorted(tmp_path.iterdir()):
        checkpointer = Checkpointer(folder, keep_last=1)
        step = checkpointer.latest()
        newest.append(step)
        got, host = checkpointer.restore(step, abstract(tree))
        assert (set(np.asarray(got["w"]).ravel()), host) == ({step}, {"step": step})
        checkpointer.save(step + 1, {"w": tree["w"] - 1}, {"again": True})
        checkpointer.wait()
        got, host = checkpointer.restore(step + 1, abstract(tree))
        assert (set(np.asarray(got["w"]).ravel()), host) == ({-1}, {"again": True})
        checkpointer.close()
    assert (newest[0], newest[-1]) == (1, 2), "the last one was not killed"
    assert set(newest) == {1, 2}
    assert len(newest) == len(died)


def test_nothing_on_disk_is_a_pickle(checkpointer, tmp_path):
    checkpointer.save(1, {"x": jnp.arange(3)}, HOST)
    checkpointer.wait()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if path.read_bytes()[:1] == b"\x80" or path.suffix in (".pkl", ".pickle")] == []
    assert json.loads((tmp_path / "checkpoints/1/host/metadata").read_text()) == HOST


def run_python(code, *arguments, devices, no_errors=None):
    """What it prints; `no_errors` is what must not be on standard error."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert no_errors is None or no_errors not in done.stderr
    return done.stdout
