"""`debug.deterministic`: what GPUs' compilers are asked for, and what the clock may no longer decide."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_post import config, config_rewards, recipes
from jaxrl_post.data.tokenizer import ByteTokenizer
from jaxrl_post.deterministic import VARIABLE, ask_for_same_bits
from jaxrl_post.loops import network
from jaxrl_post.rewards.call import Graded, RewardError
from jaxrl_post.rewards.grader import Grader
from jaxrl_post.rewards.model import Setting
from jaxrl_post.rewards.reward import build_reward
from jaxrl_post.types import Prompt, Response

ROOT = Path(__file__).parent.parent
ONLINE, OFFLINE = (str(ROOT / "configs" / "tiny" / f"{name}.yaml") for name in ("grpo", "sft"))
BOTH = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


def asked(flags, recipe=ONLINE, switch="true"):
    environ = {} if flags is None else {VARIABLE: flags}
    ask_for_same_bits(recipes.load(recipe, [f"debug.deterministic={switch}"]), environ)
    return environ.get(VARIABLE)


@pytest.mark.parametrize("recipe", [ONLINE, OFFLINE])
@pytest.mark.parametrize(
    ("flags", "after"),
    [
        (None, BOTH),
        ("", BOTH),
        (
            "--xla_dump_to=x  --xla_gpu_autotune_level=0",
            "--xla_dump_to=x --xla_gpu_autotune_level=0 " + BOTH.split()[0],
        ),
        ("--xla_gpu_deterministic_ops --xla_gpu_autotune_level=0", "--xla_gpu_deterministic_ops " + BOTH.split()[1]),
        (BOTH, BOTH),
    ],
)
def test_flags_are_added_to_those_of_the_user(recipe, flags, after):
    assert asked(flags, recipe) == after


def test_nothing_is_asked_for_without_the_switch():
    assert asked(None, switch="false") is None
    assert asked("--xla_gpu_autotune_level=4", switch="false") == "--xla_gpu_autotune_level=4"


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            "--xla_gpu_autotune_level=4",
            "has --xla_gpu_autotune_level=4, and debug.deterministic=true needs --xla_gpu_au",
        ),
        ("--xla_gpu_deterministic_ops=false", "has --xla_gpu_deterministic_ops=false, and debug.deterministic=true"),
        ("flags.txt", "XLA_FLAGS=flags.txt is the name of a file, which debug.deterministic=true cannot add to"),
    ],
)
def test_flags_that_say_otherwise_are_refused(flags, parts):
    with pytest.raises(ValueError, match=parts):
        asked(flags)


COMPILE = """
import sys
from launch import __main__ as program

def run(*_):
    import jax
    jax.jit(jax.numpy.sin)(1.0)

program._run = run
sys.exit(program.main(sys.argv[1:]))
"""


def test_the_compiler_of_the_process_has_the_flags(tmp_path):
    """As it says itself, of a program compiled where a run would begin; a run that contradicts does not begin."""
    words = [sys.executable, "-c", COMPILE, ONLINE, f"run_dir={tmp_path}/run", "debug.deterministic=true"]
    environ = os.environ | {VARIABLE: f"--xla_dump_to={tmp_path}/dump", "JAX_PLATFORMS": "cpu"}
    subprocess.run(words, cwd=ROOT, env=environ, check=True, capture_output=True)
    [options] = (tmp_path / "dump").glob("*jit_sin.debug_options")
    told = options.read_text().splitlines()
    assert {"xla_gpu_deterministic_ops: true", "xla_gpu_autotune_level: 0"} <= set(told)

    environ[VARIABLE] += " --xla_gpu_autotune_level=2"
    refused = subprocess.run(words, cwd=ROOT, env=environ, check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: XLA_FLAGS has --xla_gpu_autotune_level=2, and debug.deterministic=true")
    assert refused.stderr.count("\n") == 1


SCATTER = """
import sys
from jaxrl_post import recipes
from jaxrl_post.deterministic import ask_for_same_bits
from launch.no_devices import look_for_none
ask_for_same_bits(recipes.load(sys.argv[1], sys.argv[2:]))
look_for_none()
import jax, jax.numpy as jnp
from sharding.targets import open_target, parse_target
[device] = open_target(parse_target("h200:1x1"))
at = jax.sharding.SingleDeviceSharding(device)
arguments = (((99, 8), jnp.float32), ((999,), jnp.int32), ((999, 8), jnp.float32))
x, i, v = (jax.ShapeDtypeStruct(*one, sharding=at) for one in arguments)
print(jax.jit(lambda x, i, v: x.at[i].add(v)).lower(x, i, v).compile().as_text().count("sort"))
"""


@pytest.mark.slow
@pytest.mark.portability
def test_a_gpu_adds_up_in_one_order():
    """Rows that several indices add to: without the switch with atomics, with it sorted beforehand."""
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"PYTHONPATH": str(ROOT)}
    counts = []
    for switch in ("false", "true"):
        words = [sys.executable, "-c", SCATTER, ONLINE, f"debug.deterministic={switch}"]
        done = subprocess.run(words, env=environ, check=True, capture_output=True, text=True)
        counts.append(int(done.stdout))
    assert counts[0] == 0 < counts[1]


def test_a_gpu_that_was_not_asked_is_refused(monkeypatch):
    recipe = recipes.load(ONLINE, ["debug.deterministic=true"])
    monkeypatch.setenv(VARIABLE, "--xla_gpu_autotune_level=0")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    network._check_same_bits(recipe, mesh)  # of a CPU nothing is asked
    monkeypatch.setattr(network, "platform", lambda _: "gpu")
    with pytest.raises(
        ValueError, match=r"debug.deterministic=true needs --xla_gpu_deterministic_ops=true in XLA_FLAGS"
    ):
        network._check_same_bits(recipe, mesh)
    monkeypatch.setenv(VARIABLE, BOTH)
    network._check_same_bits(recipe, mesh)


@pytest.mark.parametrize("recipe", [ONLINE, OFFLINE])
@pytest.mark.parametrize("key", ["checkpoint.every_minutes=5", "checkpoint.before=01:00:00"])
def test_saves_by_the_clock_are_refused(recipe, key):
    recipes.load(recipe, [key])
    with pytest.raises(ValueError, match=f"{key.replace('=5', '=5.0')} saves by the clock, and debug.deterministic=tr"):
        recipes.load(recipe, [key, "debug.deterministic=true"])


def responses():
    prompt = Prompt((1,), "q", {})
    return [Response(prompt, text, np.array([2])) for text in ("a", "b")]


@pytest.mark.parametrize(("fault", "ends"), [("timeout", True), ("crash", False), ("error", False)])
def test_the_clock_decides_no_score(fault, ends):
    """What hangs ends the run; what fails by itself does so again, and costs its sample as ever."""
    score = lambda _: [Graded(1.0), Graded(None, fault, "had not ended after reward.timeout=3 s")]
    clocked = Grader("slow", score, failure_score=-1.0)
    assert clocked(responses()).tolist() == [1.0, -1.0]
    same = Grader("slow", score, failure_score=-1.0, no_clock=True)
    if not ends:
        assert same(responses()).tolist() == [1.0, -1.0]
        return
    with pytest.raises(
        RewardError, match=r"slow, sample 1 \('b'\): had not ended after .* lets no clock decide a score"
    ):
        same(responses())


def test_a_recipe_gives_its_graders_no_clock():
    setting = Setting(config.Mesh(), ByteTokenizer(), ByteTokenizer.vocab_size, max_tokens=64, samples=4)
    asked = config_rewards.FunctionReward(kind="function", function="jaxrl_post.rewards.text:digit_fraction")
    for deterministic in (False, True):
        reward = build_reward(asked, Setting(**vars(setting) | {"deterministic": deterministic}))
        assert [grader.no_clock for grader in reward.graders] == [deterministic]
        reward.close()
