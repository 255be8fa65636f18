"""One code for CPUs, GPUs and TPUs: it compiles for all of them anywhere, and gives the CPU's numbers on what is there.

    pytest -m portability          # the same on a laptop, a GPU or a TPU host; ends with what each platform did

On a machine without an accelerator the numerics run on the CPU alone, and the summary says so.
"""

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
]  # fmt: skip


def run(script, *arguments):
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiles in half the time
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
    }
    done = subprocess.run(
        [sys.executable, HERE / script, *arguments], capture_output=True, text=True, timeout=590, cwd=ROOT, env=environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_step_gives_the_same_numbers_on_whatever_is_here(did):
    """Ids of 8 samples, their log-probs, the loss, the gradient's norm and the weights after the update.

    `expected.json` is what a CPU gave: `python tests/portability/run_here.py cpu > tests/portability/expected.json`.
    """
    here, expected = run("run_here.py")[-1], json.loads((HERE / "expected.json").read_text())
    assert here["ids"] == expected["ids"]
    for ours, theirs in zip(here["logp"], expected["logp"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert here["gap"] <= 1e-4
    np.testing.assert_allclose(here["loss"], expected["loss"], rtol=0, atol=1e-4)
    for name in ("grad_norm", "weights"):
        np.testing.assert_allclose(here[name], expected[name], rtol=1e-3)
    did(here["platform"], f"sampled and updated with the CPU's numbers ({here['device']})")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200:1x1", "v5e:2x2"])
def test_the_update_of_every_online_method_compiles_for_hardware_that_is_not_here(target, did):
    recipes = [f"configs/tiny/{name}.yaml" for name in ONLINE]
    compiled = run("compile_updates.py", target, *recipes)
    assert [line["recipe"] for line in compiled] == recipes
    did(target, f"compiled the updates of {len(compiled)} online methods")
