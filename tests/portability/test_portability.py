"""One code for CPUs, GPUs and TPUs: it compiles for all of them anywhere, and gives the CPU's numbers on what is there.

    pytest -m portability          # the same on a laptop, a GPU or a TPU host; ends with what each platform did

On a machine without an accelerator the numerics run on the CPU alone, and the summary says so.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.portability
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ONLINE = [
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "remax", "opo", "pass_at_k", "maxrl", "lite_ppo", "gpg", "gdpo",
    "dapo", "gspo", "cispo", "sapo", "dppo", "gmpo", "topr", "policy_gradient", "custom", "ppo", "moe_grpo",
    "offload",
]  # fmt: skip
OFFLINE = [
    "sft", "dpo", "mpo", "f_dpo", "robust_dpo", "hinge", "ipo", "kto", "orpo", "simpo", "cpo", "exo", "nca", "bco",
    "sppo", "apo_zero", "apo_down", "discopop", "reward_model",
]  # fmt: skip


def attempt(script, *arguments):
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiles in half the time
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
    }
    command = [sys.executable, HERE / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=ROOT, env=environ)


def run(script, *arguments):
    done = attempt(script, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("attention", ["xla", pytest.param("flash", marks=pytest.mark.slow)])
def test_a_step_gives_the_same_numbers_on_whatever_is_here(attention, did):
    """Ids of 8 samples, their log-probs, the loss, the gradient's norm and the weights after the update.

    `expected.json` is what a CPU gave: `python run_here.py xla cpu > expected.json`.
    cuDNN has no float32: benchmarks/gpu.py compares it.
    """
    here, expected = run("run_here.py", attention)[-1], json.loads((HERE / "expected.json").read_text())
    assert here["ids"] == expected["ids"]
    for ours, theirs in zip(here["logp"], expected["logp"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert here["gap"] <= 1e-4
    np.testing.assert_allclose(here["loss"], expected["loss"], rtol=0, atol=1e-4)
    for name in ("grad_norm", "weights"):
        np.testing.assert_allclose(here[name], expected[name], rtol=1e-3)
    did(here["platform"], f"sampled and updated with {attention} attention and the CPU's numbers ({here['device']})")


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("target", ["h200:1x1", "v5e:2x2"])
@pytest.mark.parametrize(("kind", "names"), [("online", ONLINE), ("offline", OFFLINE)])
def test_the_update_of_every_method_compiles_for_hardware_that_is_not_here(kind, names, target, did):
    recipes = [f"configs/tiny/{name}.yaml" for name in names]
    compiled = run("compile_updates.py", target, *recipes)
    assert [line["recipe"] for line in compiled] == recipes
    did(target, f"compiled the updates of {len(compiled)} {kind} methods")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "attention", "kernel"),
    [
        ("cpu", "xla", None),
        ("cpu", "flash", None),
        ("h200:1x1", "xla", None),
        ("h200:1x1", "flash", "flash_attend"),
        ("h200:1x1", "cudnn", "__cudnn$fmhaScaleBiasSoftmax"),
        ("v5e:2x2", "xla", None),
        ("v5e:2x2", "flash", "flash_attend"),
    ],
)
def test_both_layouts_of_rows_compile_with_each_backend(target, attention, kernel, did):
    """Groups that share a prompt as branches of a row, and one sample after another; a CPU interprets its kernels."""
    recipe = f"configs/tiny/grpo.yaml,model.attention={attention}"
    if attention == "cudnn" and importlib.util.find_spec("nvidia.cudnn") is None:
        assert (
            "model.attention=cudnn needs cuDNN: pip install nvidia-cudnn-cu13"
            in attempt("compile_updates.py", target, recipe).stderr
        )
        did(target, "refused cudnn attention: cuDNN, which compiles it, is not installed (nvidia-cudnn-cu13)")
        return
    compiled = run("compile_updates.py", target, recipe, f"{recipe},training.share_prefix=false")
    assert len(compiled) == 2
    for line in compiled:
        assert line["attention"] == attention
        own = [name for name in line["kernels"] if name.startswith(("flash", "__cudnn"))]
        assert kernel in own if kernel else not own
    did(target, f"compiled both layouts of rows with {attention} attention")
