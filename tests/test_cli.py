"""The command line: what it says, how it ends, and that it costs no accelerator stack to say it."""

import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post import recipes
from jaxrl_post.observe.progress import Phases
from launch.__main__ import main
from launch.faults import is_user_error

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny" / "grpo.yaml")


def launch(*words: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "launch", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def stand_in(monkeypatch):
    """Puts a function in the place of one that a command calls; returns the list of its calls."""

    def place(module: str, name: str, effect=lambda *_: None) -> list:
        calls = []

        def function(*arguments):
            calls.append(arguments)
            return effect(*arguments)

        fake = types.ModuleType(module)
        setattr(fake, name, function)
        monkeypatch.setitem(sys.modules, module, fake)
        return calls

    return place


@pytest.mark.parametrize("words", [["--help"], [TINY, "--print-config"], ["fetch", "--help"], [TINY, "lr=1"]])
def test_help_configs_and_mistakes_do_not_import_jax(words):
    script = (
        "import sys, launch.__main__ as cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted({'jax', 'flax', 'numpy', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_mistake_is_one_line_and_exit_code_2():
    done = launch(TINY, "optimizer.learning_rte=1e-5")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {TINY}: optimizer.learning_rte: no such key in section optimizer")
    assert len(done.stderr.splitlines()) == 1


def test_the_traceback_can_be_asked_for():
    done = launch("nothing.yaml", JAXRL_POST_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "no recipe at nothing.yaml" in done.stderr


def test_print_config_shows_effective_values_and_reads_back(capsys, tmp_path):
    assert main([TINY, "seed=5", "--print-config", "optimizer.learning_rate=1e-5"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    config = recipes.load(printed)
    assert (config.seed, config.optimizer.learning_rate, config.rollout.temperature) == (5, 1e-5, 1.0)
    assert config == recipes.load(TINY, ["seed=5", "optimizer.learning_rate=1e-5"])


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for text in ("python -m launch CONFIG", "--print-config", "launch fetch NAME", "launch export RUN_DIR --to DIR"):
        assert text in shown


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["give a recipe", "usage: python -m launch CONFIG"]),
        (["fecth", "x"], ["fecth is neither a recipe nor a command", "Did you mean fetch?"]),
        (["quickstrt"], ["Did you mean configs/quickstart.yaml?"]),
        (["train", "configs/quickstart.yaml"], ["To train: python -m launch CONFIG"]),
        (["seed=1", "configs/quickstart.yaml"], ["the recipe comes before the overrides"]),
        (["configs/quikstart.yaml"], ["did you mean configs/quickstart.yaml?"]),
        (["configs"], ["is a folder"]),
        (["configs/quickstart.yaml", "--seed=1"], ["write seed=1"]),
        (["configs/quickstart.yaml", "--print-confg"], ["--print-confg", "usage"]),
        (["configs/quickstart.yaml", "--replay", "x", "--rollout-only"], ["--replay", "leave out", "--rollout-only"]),
        (["configs/quickstart.yaml", "--max-restarts", "3"], ["--max-restarts 3 needs --processes"]),
        (["fetch"], ["NAME"]),
        (["export", "runs/x"], ["--to"]),
    ],
)
def test_a_command_that_is_not_understood_says_what_would_be(words, parts, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert [part for part in parts if part not in shown] == []


def test_commands_hand_over_what_was_typed(stand_in, capsys):
    run = stand_in("jaxrl_post.loops.online", "run")
    fetch = stand_in("launch.fetch", "fetch", lambda name: Path("/cache") / name)
    export = stand_in("launch.export", "export")
    assert main([TINY, "steps=9"]) == main(["fetch", "some-model"]) == main(["export", "runs/x", "--to", "out"]) == 0
    assert main(["export", "runs/x", "--to", "out", "--step", "9"]) == 0
    assert main(["export", "runs/x", "--to", "out", "--step", "best"]) == 0
    assert run == [(recipes.load(TINY, ["steps=9"]),)]
    assert fetch == [("some-model",)]
    assert export == [("runs/x", "out", None), ("runs/x", "out", 9), ("runs/x", "out", "best")]
    assert capsys.readouterr().out == "/cache/some-model\n"


def test_an_interrupted_run_exits_130(stand_in, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    stand_in("jaxrl_post.loops.online", "run", interrupt)
    assert main([TINY]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(stand_in):
    stand_in("jaxrl_post.loops.online", "run", lambda _: np.zeros(3) + np.zeros(4))
    with pytest.raises(ValueError, match="broadcast"):
        main([TINY])


def test_a_missing_file_met_by_the_run_is_one_line(stand_in, capsys):
    stand_in("jaxrl_post.loops.online", "run", lambda _: Path("/nowhere/model.safetensors").read_bytes())
    assert main([TINY]) == 2
    assert "/nowhere/model.safetensors" in capsys.readouterr().err


def in_package(name: str, source: str) -> BaseException:
    """The exception that `source` ends with when it is code of the package `name`."""
    try:
        exec(compile(source, name, "exec"), {"__name__": name, "Phases": Phases})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("package", "source", "users"),
    [
        ("jaxrl_post.data.tasks", "raise ValueError('bad row')", True),
        ("sharding.mesh", "raise ValueError('3x2=6, have 8')", True),
        ("jaxrl_post.loops.online", "with Phases()('gen'):\n  raise ValueError('in a phase')", True),
        ("jaxrl_post.data.tasks", "raise ValueError('no name') from OSError('x')", True),
        ("jaxrl_post.data.tasks", "int('x')", False),
        ("jaxrl_post.data.tasks", "a, b = (1, 2, 3)", False),
        ("jaxrl_post.data.tasks", "import json\njson.loads('{')", False),
        ("jaxrl_post.data.tasks", "import numpy\nnumpy.zeros(3) + numpy.zeros(4)", False),
        ("jaxrl_post.data.tasks", "raise TypeError('x')", False),
        ("jaxrl_post.data.tasks", "open('/nowhere/x')", True),
        ("my_reward", "raise ValueError('in a reward of the user')", False),
    ],
)
def test_whose_fault_it_is(package, source, users):
    assert is_user_error(in_package(package, source)) is users
