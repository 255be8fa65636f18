"""Attention by name: what is picked, what is refused, and that a mesh and a whole update change no number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_flash import B, T, inputs, of_xla, outcome, packed_rows
from tiny_models import CASES

from jaxrl_post.config import Config
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.network import initial_params
from jaxrl_post.loops.packed import update_shape
from jaxrl_post.loops.planning import stand_in_job
from jaxrl_post.models import backends
from jaxrl_post.models.placement import Placement
from jaxrl_post.observe.progress import Phases
from jaxrl_post.types import Trajectory
from sharding import make_mesh

BFLOAT16 = dataclasses.replace(CASES["qwen3"], dtype="bfloat16", head_dim=128)
FLASH = dataclasses.replace(CASES["qwen3"], attention="flash", platform="cpu")


@pytest.mark.parametrize(
    ("platform", "dtype", "ring", "picked"),
    [
        ("cpu", "float32", False, "xla"),
        ("cpu", "bfloat16", False, "xla"),
        ("gpu", "bfloat16", False, "flash"),
        ("gpu", "float32", False, "xla"),
        ("gpu", "bfloat16", True, "xla"),
        ("tpu", "bfloat16", False, "flash"),
        ("tpu", "bfloat16", True, "xla"),
    ],
)
def test_auto_picks_kernels_where_they_serve(platform, dtype, ring, picked):
    model = dataclasses.replace(BFLOAT16, dtype=dtype)
    assert backends.choose("auto", model, platform, ring) == picked
    wide = dataclasses.replace(model, head_dim=264)
    assert backends.choose("auto", wide, platform, ring) == ("xla" if platform == "gpu" else picked)


@pytest.mark.parametrize(
    ("asked", "changes", "platform", "ring", "words"),
    [
        ("flash", {}, "gpu", True, ["model.attention=flash", "sequence_attention=ulysses", "model.attention=xla"]),
        (
            "flash",
            {"head_dim": 264},
            "gpu",
            False,
            ["model.attention=flash", "up to 512 bytes", "264 × bfloat16"],
        ),
        ("cudnn", {}, "gpu", True, ["model.attention=cudnn", "sequence_attention=ulysses"]),
        ("cudnn", {}, "tpu", False, ["cudnn", "NVIDIA", "tpu", "flash or xla"]),
        ("cudnn", {"dtype": "float32"}, "gpu", False, ["cudnn", "model.dtype=float32", "model.dtype=bfloat16"]),
        ("cudnn", {"head_dim": 192}, "gpu", False, ["cudnn", "multiples of 8 up to 128", "192", "flash or xla"]),
        ("cudnn", {"head_dim": 36}, "gpu", False, ["cudnn", "multiples of 8", "36"]),
    ],
)
def test_a_backend_that_cannot_serve_is_refused_by_name(asked, changes, platform, ring, words):
    with pytest.raises(ValueError, match=asked) as error:
        backends.choose(asked, dataclasses.replace(BFLOAT16, **changes), platform, ring)
    assert all(word in str(error.value) for word in words)


def test_what_can_serve_is_what_was_asked_for():
    for asked, platform in (("xla", "tpu"), ("flash", "cpu"), ("flash", "gpu"), ("cudnn", "gpu")):
        assert backends.choose(asked, BFLOAT16, platform, ring=False) == asked
    assert backends.choose("xla", BFLOAT16, "gpu", ring=True) == "xla"


def test_rows_that_a_backend_cannot_take_are_refused_with_the_next_it_can():
    on = lambda attention, platform: dataclasses.replace(BFLOAT16, attention=attention, platform=platform)
    with pytest.raises(ValueError, match=r"rows of 40000 .*TPU.*at most (\d+) do: set model.attention=xla") as error:
        backends.check_length(on("flash", "tpu"), 40000)
    most = int(str(error.value).split("at most ")[1].split()[0])
    backends.check_length(on("flash", "tpu"), most)
    with pytest.raises(ValueError, match=f"rows of {most + 1} "):
        backends.check_length(on("flash", "tpu"), most + 1)
    for attention, platform in (("flash", "gpu"), ("xla", "tpu")):
        backends.check_length(on(attention, platform), 10**6)
    with pytest.raises(ValueError, match=r"rows of 97 .*cudnn.*training.row_length to 98"):
        backends.check_length(on("cudnn", "gpu"), 97)


def recipe(**changes):
    raw = {
        "model": {"random": {"heads": 4, "kv_heads": 2}} | changes.pop("model", {}),
        "mesh": {"fsdp": 8} | changes.pop("mesh", {}),
        "data": {"prompts_per_step": 8, "max_prompt_tokens": 16},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 16},
        "training": changes.pop("training", {}),
        "optimizer": {"learning_rate": 1e-3},
    }
    return Config.model_validate(raw)


def test_a_recipe_is_refused_before_any_device_work():
    network = lambda config: stand_in_job(config, jax.devices()).network.model.attention
    assert network(recipe()) == "xla"
    assert network(recipe(model={"attention": "flash"})) == "flash"
    with pytest.raises(ValueError, match=r"model.attention=cudnn: .*these devices are a cpu's"):
        network(recipe(model={"attention": "cudnn"}))
    cut = {"fsdp": 4, "sequence": 2}
    with pytest.raises(ValueError, match=r"model.attention=flash: a ring"):
        network(recipe(model={"attention": "flash"}, mesh=cut))
    assert (
        network(recipe(model={"attention": "flash"}, mesh=cut, training={"sequence_attention": "ulysses"})) == "flash"
    )


@pytest.mark.parametrize(("attention", "length"), [("xla", 1024), ("flash", 2560)])
def test_a_row_takes_a_whole_group_where_its_samples_cost_each_other_nothing(attention, length):
    """A prompt of 512 and samples of 512: 1024 columns are one sample, 512 + 4 × 512 all of a group."""
    config = recipe(model={"attention": attention}, mesh={"fsdp": 1, "allow_unused_devices": True})
    long = {"data": {"prompts_per_step": 8, "max_prompt_tokens": 512}, "training": {"tokens_per_microbatch": 4096}}
    raw = config.model_dump() | long | {"rollout": {"samples_per_prompt": 4, "max_new_tokens": 512}}
    job = stand_in_job(Config.model_validate(raw), jax.devices()[:1])
    assert update_shape(job, 512).length == length


def on_rows_and_heads():
    """Rows over data, heads over tensor."""
    mesh = make_mesh({"data": 2, "tensor": 2})
    return backends.attention(FLASH, Placement(NamedSharding(mesh, P("data"))))


def with_exchanged_heads():
    """Columns over sequence, in whose program the kernels have one of their own."""
    mesh = make_mesh({"data": 2, "sequence": 2})
    exchanged, place = (
        dataclasses.replace(FLASH, sequence_attention="ulysses"),
        Placement(NamedSharding(mesh, P("data", "sequence"))),
    )
    local = lambda *rows: backends.attention(exchanged, place)(*rows)
    columns = P(None, "sequence")
    return jax.shard_map(
        local, mesh=mesh, in_specs=(columns,) * 5, out_specs=columns, axis_names={"sequence"}, check_vma=False
    )


@pytest.mark.parametrize("over", [on_rows_and_heads, pytest.param(with_exchanged_heads, marks=pytest.mark.slow)])
def test_kernels_on_a_mesh_give_the_numbers_of_one_device(over):
    for actual, wanted in zip(outcome(over(), inputs(3, jnp.float32)), of_xla(), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5)


def test_the_mask_reaches_cudnn_whole(monkeypatch):
    """cuDNN's kernel runs nowhere here; XLA's, which takes the same arguments, stands in for it."""
    call = jax.nn.dot_product_attention
    asked = []

    def stand_in(*qkv, mask, implementation):
        asked.append((implementation, mask.shape))
        return call(*qkv, mask=mask, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    for actual, wanted in zip(outcome(backends.cudnn_attention, inputs(3, jnp.float32)), of_xla(), strict=True):
        live = packed_rows()[0] > 0
        np.testing.assert_allclose(actual[live], wanted[live], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(actual[~live], 0)
    assert set(asked) == {("cudnn", (B, 1, T, T))}


def test_a_missing_cudnn_is_named(monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    with pytest.raises(ValueError, match="pip install nvidia-cudnn-cu13"):
        outcome(backends.cudnn_attention, inputs(1, jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_an_update_with_kernels_is_that_without(remat):
    """Parameters after a GRPO step on rows that share prompts, over data × tensor."""
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    ours, xla = (updated(recipe(model={"attention": name, "remat": remat}, mesh=mesh)) for name in ("flash", "xla"))
    moved = 0.0
    for (before, actual), (_, wanted) in zip(ours, xla, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5)
        moved = max(moved, float(np.abs(actual - before).max()))
    assert moved > 1e-4


def updated(config):
    """Each parameter before and after one step of samples with alternating advantages."""
    job = stand_in_job(config, jax.devices())
    learner = Learner(job)
    params = initial_params(job.network, 0)
    before = jax.device_get(params)
    rng = np.random.default_rng(0)
    ids = lambda n: tuple(rng.integers(0, 250, n).tolist())
    prompts = [ids(16) for _ in range(8)]
    samples = []
    for i in range(32):
        response = ids(int(rng.integers(3, 17)))
        samples.append(Trajectory(i // 4, prompts[i // 4], response, (-5.0,) * len(response), 1.0 if i % 2 else -1.0))
    state, _ = learner.learn(learner.trained.start(params), samples, Phases())
    return list(zip(*map(jax.tree.leaves, (before, jax.device_get(state.params))), strict=True))
