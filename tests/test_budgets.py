"""Communication budgets: what a rollout and an update send, by kind, axis and bytes, on eight devices.

A change that makes the compiler move something else (parameters in the decode loop, logits, an optimizer that is not
cut) shows as a line of a diff. A budget that is right to change is written anew from the message.
"""

import collections
import difflib
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.config import Config
from jaxrl_post.config_distillation import Distillation
from jaxrl_post.loops.gather import sample_options
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.planned_rollout import rollout_trips
from jaxrl_post.loops.planning import stand_in_job
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.training.distillation_loss import distillation_loss, taught_forward
from jaxrl_post.training.distillation_update import make_taught_update
from jaxrl_post.training.packing import empty_batch
from jaxrl_post.training.teacher_view import taught_shardings
from jaxrl_post.training.update import row_placement
from jaxrl_post.types import TaughtBatch, TeacherView
from sharding.mesh import batch_shards
from sharding.placement import bytes_per_device, placed_shapes
from sharding.report import Program
from sharding.rules import ROLLOUT

MODEL = {"hidden_size": 64, "intermediate_size": 128, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16}


def job_of(chunk=256, model=MappingProxyType({}), training=MappingProxyType({}), **mesh):
    raw = {
        "model": {"random": MODEL | dict(model), "scan_layers": True},
        "mesh": mesh,
        "data": {"prompts_per_step": 8, "max_prompt_tokens": 16},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 16},
        "training": {"tokens_per_microbatch": 256, "row_length": 64, "logprob_chunk": chunk} | dict(training),
    }
    return stand_in_job(Config.model_validate(raw), jax.devices())


def sent(traced, trips, mesh):
    """One line for each kind, axes and size, which is that of an operand or result on a device: how often."""
    count = collections.Counter()
    for c in Program(traced.lower().compile().as_text(), trips).each_collective(mesh):
        count[f"{c.kind} over {'×'.join(c.axes)} of {c.bytes // c.count:,} bytes"] += c.count
    return sorted(f"{line}: {times}" for line, times in count.items())


def assert_budget(found, budget):
    diff = "\n".join(difflib.unified_diff(budget, found, "budget", "found", lineterm="", n=99))
    assert found == budget, f"what is sent has changed\n{diff}"


def test_a_decode_loop_sends_sums_inside_a_tensor_group_and_nothing_else():
    """Once an iteration of each loop: the embedding, two sums a layer, and statistics of the draw; neither weights nor
    logits."""
    job = job_of(fsdp=4, tensor=2)
    network = job.network
    sampler = Sampler(network.graphdef, network.model, network.mesh, job.stop_ids, device_memory=1e9)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), network.abstract_params)
    shape, traced = sampler.traced(
        placed_shapes(shapes, network.shardings(ROLLOUT)), 8, sample_options(job.config, job.tokenizer), 16
    )
    assert len(rollout_trips(shape, 8 // batch_shards(network.mesh))) == 2
    assert_budget(sent(traced, [1, 1], network.mesh), ROLLOUT_BUDGET)


def test_an_update_gathers_weights_and_sums_gradients_once_a_micro_batch():
    job = job_of(fsdp=4, tensor=2)
    learner = Learner(job)
    assert learner.shape.micro_batches == 1
    assert_budget(sent(learner.traced_update(), [1], job.network.mesh), UPDATE_BUDGET)


def test_all_chunks_of_targets_share_one_gathered_head_and_one_sum_of_its_gradient():
    job = job_of(chunk=16, fsdp=4, tensor=2)
    found = sent(Learner(job).traced_update(), [1], job.network.mesh)
    over_fsdp = lambda lines: [line for line in lines if " over fsdp of " in line]
    assert_budget(over_fsdp(found), over_fsdp(UPDATE_BUDGET))


@pytest.mark.slow
def test_a_students_chunks_share_one_gathered_head_too_and_its_teachers_do():
    assert sent_by_student(chunk=16) == sent_by_student(chunk=256)


def sent_by_student(chunk):
    """Over fsdp, in an update under a teacher of the same shape."""
    job = job_of(fsdp=4, tensor=2)
    learner, network = Learner(job), job.network
    shardings = taught_shardings(learner.shape, network.mesh)
    options = Distillation(kind="distillation", teacher={"kind": "start"})
    place = row_placement(shardings.rows)
    forward = taught_forward(network.graphdef, (network.graphdef,), options, temperature=1.0, chunk=chunk, place=place)
    update = make_taught_update(
        forward,
        learner.trained.optimizer,
        distillation_loss(options),
        shardings=learner.trained.shardings,
        teacher_shardings=(network.shardings(),),
        batch_shardings=shardings,
    )
    rows = empty_batch(learner.shape)
    view = TeacherView(rows.tokens, rows.positions, rows.segments, rows.branches, rows.source, rows.source)
    batch, teachers = placed_shapes(TaughtBatch(rows, view), shardings), (network.abstract_params,)
    held = placed_shapes(teachers, (network.shardings(),))
    traced = update.trace(learner.trained.abstract_state(), batch, jax.ShapeDtypeStruct((), np.int32), held)
    return [line for line in sent(traced, [1], network.mesh) if " over fsdp of " in line]


def test_experts_are_gathered_over_fsdp_alone_and_summed_over_tensor_once_a_layer():
    """Weights of experts, 12,288 bytes each on a device, are not made whole over tensor; sums of outputs are 65,536."""
    experts = {"family": "qwen3_moe", "experts": {"count": 4, "per_token": 2, "size": 48}}
    job = job_of(model=experts, fsdp=2, expert=2, tensor=2)
    found = sent(Learner(job).traced_update(), [1], job.network.mesh)
    assert [line for line in found if line.startswith("all-gather over tensor")] == [
        "all-gather over tensor of 65,536 bytes: 1"  # the embedded rows
    ]
    assert "all-reduce over tensor of 65,536 bytes: 13" in found  # 4 a layer, and the embedding


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("ring", {"fsdp": 4, "sequence": 2}),
        pytest.param("ring", {"fsdp": 2, "sequence": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("ulysses", {"fsdp": 2, "sequence": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_rows_cut_along_time_stay_with_the_devices_that_have_them(kind, sizes):
    """Over fsdp they go once at most, as the embedding finds them, and not in each of 3 layers."""
    job = job_of(model={"kv_heads": 4}, training={"sequence_attention": kind}, **sizes)
    found = sent(Learner(job).traced_update(), [1], job.network.mesh)
    moved = [line for line in found if line.startswith("all-to-all over fsdp")]
    assert sum(int(line.rpartition(": ")[2]) for line in moved) <= 1, moved
    assert any(line.startswith("all-gather over fsdp") for line in found)  # of weights


def test_no_part_of_the_optimizer_is_whole_on_a_device():
    job = job_of(fsdp=8)
    state = Learner(job).trained.abstract_state()
    report = bytes_per_device(state, jax.tree.map(lambda x: x.sharding, state))
    whole = [leaf.name for leaf in report.leaves if leaf.per_device == leaf.total and len(leaf.shape) > 2]
    assert whole == []
    assert report.per_device < report.total / 7


# A filling, of 8,192 bytes (2 prompts × 16 positions × D), and a decode step of 8 slots: the embedding and two sums a
# layer; the rest is the draw's.
ROLLOUT_BUDGET = [
    "all-reduce over tensor of 1,056 bytes: 2",
    "all-reduce over tensor of 2,048 bytes: 7",
    "all-reduce over tensor of 256 bytes: 2",
    "all-reduce over tensor of 32 bytes: 2",
    "all-reduce over tensor of 8,192 bytes: 7",
    "all-reduce over tensor of 96 bytes: 2",
]
# Weights of 3 layers are gathered over fsdp, forward and backward; their gradients, 74,240 bytes a layer, are summed
# over it. Activations, 65,536 bytes, are summed over tensor; logits never leave a device.
UPDATE_BUDGET = [
    "all-gather over fsdp of 16,384 bytes: 18",
    "all-gather over fsdp of 2,048 bytes: 1",
    "all-gather over fsdp of 33,792 bytes: 1",
    "all-gather over fsdp of 4,096 bytes: 12",
    "all-gather over fsdp of 8,192 bytes: 12",
    "all-gather over tensor of 4,096 bytes: 1",
    "all-reduce over fsdp of 1,024 bytes: 1",
    "all-reduce over fsdp of 12 bytes: 1",
    "all-reduce over fsdp of 20 bytes: 1",
    "all-reduce over fsdp of 34,088 bytes: 1",
    "all-reduce over fsdp of 74,240 bytes: 3",
    "all-reduce over fsdp of 8 bytes: 1",
    "all-reduce over tensor of 1,024 bytes: 1",
    "all-reduce over tensor of 131,072 bytes: 3",
    "all-reduce over tensor of 16,896 bytes: 1",
    "all-reduce over tensor of 196,608 bytes: 3",
    "all-reduce over tensor of 3,072 bytes: 1",
    "all-reduce over tensor of 32 bytes: 1",
    "all-reduce over tensor of 65,536 bytes: 8",
    "all-to-all over fsdp of 65,536 bytes: 2",
    "collective-permute over fsdp×tensor of 1,024 bytes: 1",
]
