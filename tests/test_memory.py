"""Memory that runs out is told in a line that helps; a long run does not grow."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import recipes
from jaxrl_post.data.tokenizer import ByteTokenizer
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.network import build_network
from jaxrl_post.loops.out_of_memory import OutOfMemoryError, memory_explained
from jaxrl_post.loops.run_folder import newest_step
from jaxrl_post.observe.progress import Phases
from jaxrl_post.training.packing import PackShape
from launch.__main__ import main

ROOT = Path(__file__).parent.parent
ONE_DEVICE = ("mesh.fsdp=1", "mesh.allow_unused_devices=true")
SMALL = (
    *ONE_DEVICE, "model.random={family: llama, layers: 1, hidden_size: 16, intermediate_size: 32}",
    "rollout.max_new_tokens=4", "data.prompts_per_step=2", "rollout.samples_per_prompt=2", "evaluation.enabled=false",
    "training.tokens_per_microbatch=256",
)  # fmt: skip
TOO_MUCH = "RESOURCE_EXHAUSTED: Out of memory allocating 140737488355328 bytes."


def said(phase, fault, recipe="grpo.yaml"):
    """What a fault in this phase is told as."""
    config = recipes.load(ROOT / "configs" / "tiny" / recipe, ONE_DEVICE)
    network = build_network(config, None, ByteTokenizer())
    with (
        pytest.raises(OutOfMemoryError) as caught,
        memory_explained(config, network, PackShape(4, 256, 128, 2), Phases()) as phases,
        phases("step"),
        phases(phase),
    ):
        fault()
    assert isinstance(caught.value.__cause__, MemoryError | jax.errors.JaxRuntimeError)
    return str(caught.value)


def allocate():
    jax.block_until_ready(jnp.zeros(1 << 45, jnp.float32))


def test_a_device_without_room_names_phase_shapes_and_settings():
    text = said("update_actor", allocate)
    assert text.startswith(
        "out of memory in update_actor: micro-batches of 4 rows × 256 tokens, logits of 256 targets a row at once; "
    )
    assert f"vocabulary {ByteTokenizer.vocab_size}, float32 compute on 1 device." in text
    assert (
        "Lower training.tokens_per_microbatch (now 1024), training.logprob_chunk (now 256); set model.remat=full."
        in text
    )
    assert text.endswith(f"The error was: {TOO_MUCH}")


@pytest.mark.parametrize(
    ("phase", "recipe", "parts"),
    [
        ("gen", "grpo.yaml", ["4 prompts × 8 samples of up to 128 + 16 tokens", "rollout.slots (now null)"]),
        ("old_log_prob", "grpo.yaml", ["training.logprob_chunk (now 256). Checkpoints"]),
        ("start", "grpo.yaml", ["model.param_dtype (now float32), mesh.fsdp (now 1)"]),
        ("testing", "sft.yaml", ["training.tokens_per_microbatch (now"]),
    ],
)
def test_advice_is_that_of_the_phase(phase, recipe, parts):
    text = said(phase, lambda: bytearray(1 << 60), recipe)
    assert all(part in text for part in (f"out of memory in {phase}: ", *parts, "The error was: MemoryError"))


def test_other_faults_of_a_device_keep_their_traceback():
    config = recipes.load(ROOT / "configs" / "tiny" / "grpo.yaml", ONE_DEVICE)
    network = build_network(config, None, ByteTokenizer())
    fault = jax.errors.JaxRuntimeError("INTERNAL: link down")
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="link down"),
        memory_explained(config, network, PackShape(4, 256, 128, 2), Phases()),
    ):
        raise fault


@pytest.mark.slow
def test_a_run_that_runs_out_ends_with_a_line_and_keeps_its_checkpoints(tmp_path, monkeypatch, capsys):
    learn, calls = Learner.learn, []

    def learn_twice(self, state, trajectories, phases):
        calls.append(1)
        if len(calls) == 3:
            with phases("update_actor"):
                raise jax.errors.JaxRuntimeError(TOO_MUCH)
        return learn(self, state, trajectories, phases)

    monkeypatch.setattr(Learner, "learn", learn_twice)
    monkeypatch.chdir(ROOT)
    assert main(["configs/tiny/grpo.yaml", f"run_dir={tmp_path}", "steps=5", "checkpoint.every=1", *SMALL]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: out of memory in update_actor: ")
    assert error.count("\n") == 1
    assert newest_step(tmp_path) == 2
    assert len(calls) == 3


GRADER = """
import os

def score(prompts, completions, rows):
    pages = int(open("/proc/self/statm").read().split()[1])
    with open(os.environ["RSS_FILE"], "a") as file:
        file.write(f"{pages * os.sysconf('SC_PAGE_SIZE')}\\n")
    return [len(set(text)) / 8 for text in completions]
"""


@pytest.mark.slow
def test_host_memory_is_bounded_over_many_steps(tmp_path):
    """The resident set of a run of 400 steps with checkpoints and rollouts, from the grader, which runs in process."""
    (tmp_path / "watching_grader.py").write_text(GRADER)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "RSS_FILE": str(tmp_path / "rss")}
    words = (
        f"run_dir={tmp_path}/run", "steps=400", "checkpoint.every=50", "reward.function=watching_grader:score",
        "reward.workers=0", "reward.per=step", *SMALL,
    )  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "launch", "configs/tiny/grpo.yaml", *words], cwd=ROOT, env=environment, check=True
    )
    resident = np.loadtxt(tmp_path / "rss")[100:] / 2**20
    assert len(resident) == 300
    slope = np.polyfit(np.arange(300), resident, 1)[0]
    print(f"resident {resident[0]:.0f} -> {resident[-1]:.0f} MiB, slope {slope * 1024:.1f} KiB a step")
    assert slope < 0.03  # MiB a step: 15 MiB over 500
