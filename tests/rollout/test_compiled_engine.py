"""The rollout of a run compiled for an H200 and for TPU v5e on a machine with neither: it never copies its cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def compiled(target, tokens, slots, *words):
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, HERE / "compiled_engine.py", target, str(tokens), str(slots), *words],
        capture_output=True, text=True, timeout=540, env=environ | {"PYTHONPATH": str(HERE.parent.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("target", "tokens", "slots"),
    [
        pytest.param("v5e:2x2", 31, 64, id="v5e"),  # one tier
        pytest.param("h200:1x1", 31, 64, id="h200", marks=pytest.mark.slow),
        pytest.param("h200:1x1", 2048, 32, id="h200_refilled", marks=pytest.mark.slow),
        pytest.param("h200:1x8", 1024, 64, id="h200_packed", marks=pytest.mark.slow),
        pytest.param("v5e:2x2", 1024, 64, id="v5e_tiers", marks=pytest.mark.slow),
        # 48: what 32 slots read of a layer has by chance as many elements as the stack of prompts.
        pytest.param("v5e:2x2", 1024, 48, id="v5e_refilled", marks=pytest.mark.slow),
    ],
)
def test_the_decode_loops_copy_no_stack_of_keys_or_values(target, tokens, slots):
    """Not at any step, and not between two loops: all temporaries together are little more than the cache."""
    found = compiled(target, tokens, slots)
    assert found["copied"] == []
    if tokens > 64:  # else the 32 MB that cuBLAS works in are most of it
        assert found["temporaries"] <= 1.25 * found["cache"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "tokens"), [("h200:1x8", 1024), ("v5e:2x2", 1024)])
def test_a_rollout_in_parts_hands_its_cache_on_as_it_lies(target, tokens):
    found = compiled(target, tokens, 64, "parts")
    assert found["copied"] == []
    assert found["in_place"] >= found["cache"]
    assert found["temporaries"] <= 0.25 * found["cache"]
