"""What a person can get wrong, through the command line: one line that names it, exit code 2, nothing written."""

import dataclasses
import errno
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from models.tiny_models import BASE, draw
from safetensors.numpy import load_file, save_file

from jaxrl_post import recipes
from jaxrl_post.data import chat_template
from jaxrl_post.loops.job import build
from jaxrl_post.loops.run_folder import write_config
from jaxrl_post.models.huggingface_export import save_params
from jaxrl_post.observe.metrics import MetricsWriter
from jaxrl_post.rewards.call import answer
from jaxrl_post.rewards.function import load_function
from jaxrl_post.rewards.grader import Grader, by_calls
from jaxrl_post.run_dir import Claim
from jaxrl_post.types import Prompt, Response
from launch.__main__ import main
from launch.byte_tokenizer import write_byte_tokenizer

TINY = str(Path(__file__).parent.parent / "configs" / "tiny" / "grpo.yaml")
SMALL = {
    "steps": 1, "evaluation.enabled": "false", "data.prompts_per_step": 2, "rollout.samples_per_prompt": 2,
    "rollout.max_new_tokens": 4, "mesh.fsdp": 1, "mesh.allow_unused_devices": "true",
}  # fmt: skip
COMPILES = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: COMPILES.append(name))


def compiles():
    return sum("backend_compile" in name for name in COMPILES)


def tree(folder):
    """Every path below and what each file holds; None for a folder that is not there."""
    if not folder.exists():
        return None
    return {str(p): p.read_bytes() if p.is_file() else None for p in [folder, *folder.rglob("*")]}


@pytest.fixture
def launch(tmp_path, capsys):
    """Runs the tiny recipe with overrides into `tmp_path/run`; returns the exit code."""

    def launched(**changes):
        words = [f"{key}={value}" for key, value in ({"run_dir": tmp_path / "run"} | SMALL | changes).items()]
        return main([TINY, *words])

    return launched


@pytest.fixture
def refused(launch, tmp_path, capsys):
    """Asserts that a launch is refused in one line with all the given parts, before any compile or write."""

    def check(*parts, **changes):
        before, compiled = tree(tmp_path / "run"), compiles()
        assert launch(**changes) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("error: ")
        assert len(shown.splitlines()) == 1, shown
        assert [part for part in parts if part not in shown] == [], shown
        assert (tree(tmp_path / "run"), compiles()) == (before, compiled)

    return check


@functools.cache
def weights():
    shape = dataclasses.replace(BASE, vocab_size=264, tie_embeddings=True, max_positions=256)
    return shape, draw(shape)


@pytest.fixture
def folder(tmp_path):
    """A tiny model over bytes."""
    shape, params = weights()
    save_params(tmp_path / "model", params, shape)
    write_byte_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def model(folder):
    return {"model.random": "null", "model.path": folder}


def edit(file, **changes):
    """Sets keys of a JSON object; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": 3}, ["architecture 3", "LlamaForCausalLM"]),
        ({"architectures": ["MistralForCausalLM"]}, ["MistralForCausalLM", "Qwen3ForCausalLM"]),
        ({"hidden_size": None}, ["lacks 'hidden_size'"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers='2'", "positive whole number"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000", "20 tensors"]),
        ({"rms_norm_eps": float("inf")}, ["rms_norm_eps=inf", "positive number"]),
        ({"rope_theta": float("inf")}, ["rope_theta=inf"]),
        ({"rope_scaling": "linear"}, ["rope_scaling='linear'"]),
        ({"rope_parameters": "x"}, ["rope_parameters='x'"]),
        ({"layer_types": 3}, ["layer_types=3", "full_attention"]),
        ({"layer_types": [["full_attention"]]}, ["layer_types=[['full_attention']]"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings='false'", "true or false"]),
        ({"tie_word_embeddings": False}, ["lm_head.weight is missing"]),
        ({"vocab_size": 200}, ["stop ids [257]", "vocabulary of 200"]),
        ({"eos_token_id": 5000}, ["stop ids [5000]", "vocabulary of 264"]),
        ({"max_position_embeddings": 100}, ["data.max_prompt_tokens=128", "100 positions"]),
    ],
)
def test_a_model_config_that_cannot_be(refused, folder, changes, parts):
    edit(folder / "config.json", **changes)
    refused(*parts, **model(folder))


@pytest.mark.parametrize("content", ["{nope", "[1]", "[" * 100_000, ""])
def test_a_model_config_that_is_no_json_object(refused, folder, content):
    (folder / "config.json").write_text(content)
    refused(str(folder / "config.json"), **model(folder))


def test_weights_that_do_not_fit_leave_no_run_folder(refused, folder):
    file = folder / "model.safetensors"
    whole = load_file(file)
    save_file(whole | {"model.norm.weight": np.zeros(3, np.float32), "extra": np.zeros(1, np.float32)}, file)
    refused("extra is unexpected", "model.norm.weight has shape [3], expected [32]", **model(folder))
    save_file(whole, file)
    file.write_bytes(file.read_bytes()[:5000])
    refused(str(file), "truncated", **model(folder))
    file.rename(folder / "pytorch_model.bin")
    refused("pytorch_model.bin", "can run code", **model(folder))


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "a\0.safetensors", "x.bin"])
def test_an_index_that_leads_elsewhere_leaves_no_run_folder(refused, folder, shard):
    (folder / "model.safetensors").rename(folder.parent / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    refused(str(folder), repr(shard), **model(folder))


def test_weights_that_are_not_finite_stop_the_run(launch, capsys):
    assert launch(**{"model.random.initializer_range": 3e38}) == 2
    assert "log-probs at step 1 are not finite" in capsys.readouterr().err


def test_a_tokenizer_larger_than_the_model(refused, folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 300, "content": "<big>"})
    content["model"]["vocab"]["<big>"] = 300
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text("<big>{{ messages[0].content }}")
    refused(str(folder), "gives id 300 for the prompt '<big>What is", "vocabulary of 264", **model(folder))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no\\nway') }}", "no way"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a'.index('b') }}", "substring not found"),
        ("{{ ().__class__ }}", "sandbox"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "not ended after 0.2 s"),
    ],
)
def test_a_chat_template_that_does_not_render(refused, folder, monkeypatch, template, reason):
    if "range" in template:
        monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    (folder / "chat_template.jinja").write_text(template)
    refused(str(folder / "chat_template.jinja"), reason, **model(folder))


def test_stop_ids_outside_the_vocabulary(refused):
    refused("rollout.stop_token_ids", "[264]", "264", **{"rollout.stop_token_ids": "[264]"})


def test_an_answer_that_is_no_number(refused, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": NaN}\n')
    task = {"data.task.kind": "jsonl", "data.task.path": tmp_path / "rows.jsonl"}
    refused("answer=nan", **task, reward="{kind: exact_match}")


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module of the user's; its name never repeats."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        name = f"user_{abs(hash((str(tmp_path), source)))}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("raise RuntimeError('boom\\nsecond')", ["RuntimeError: boom second", ".py:1)"]),
        ("import sys\nsys.exit(0)", ["SystemExit: 0", ".py:2)"]),
    ],
)
def test_a_reward_module_that_ends_on_import(refused, user_module, source, parts):
    refused("reward.function", *parts, **{"reward.function": f"{user_module(source)}:f"})


@pytest.mark.parametrize("error", ["ValueError", "SystemExit"])
def test_a_reward_that_fails_is_told_in_one_line(user_module, error):
    name = user_module(f"def f(prompts, completions, rows):\n    raise {error}('one\\ntwo')")
    f = load_function(f"{name}:f")
    reward = Grader(f"{name}:f", by_calls(lambda calls: [answer(f, call) for call in calls], "sample"))
    with pytest.raises(ValueError, match=rf"^reward {name}:f, .* raised {error}: one two \({name}\.py:2\)$"):
        reward([Response(Prompt((1,), "a", {}), "b", np.array([2]))])


@pytest.mark.parametrize("place", ["", "/run"])
def test_a_run_folder_that_cannot_be(refused, tmp_path, place):
    (tmp_path / "file").write_text("x")
    said = f"run_dir={tmp_path}/file{place}: {tmp_path}/file is a file, and a run writes a folder"
    refused(said, "such as run_dir=runs/name", run_dir=f"{tmp_path}/file{place}")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("path", ["", "~/runs/x", "a\0b"])
def test_a_run_folder_without_a_path(refused, path):
    refused(f"run_dir={path!r} is no path of a folder", "such as run_dir=runs/name", run_dir=json.dumps(path))


def test_a_run_folder_with_too_long_a_name(refused):
    refused("run_dir=xxx", "(File name too long): give another one", run_dir="x" * 300)


@pytest.mark.parametrize(("name", "found"), [("checkpoints", "file"), ("metrics.jsonl", "folder")])
def test_a_run_folder_with_something_else_in_the_way(refused, tmp_path, name, found):
    run_dir = tmp_path / "other"
    inside = run_dir / name
    inside.mkdir(parents=True) if found == "folder" else (run_dir.mkdir(), inside.write_text("mine"))
    refused(f"run_dir={run_dir}: {inside} is a {found}, where a run has a", "give another one", run_dir=run_dir)
    assert inside.is_dir() or inside.read_text() == "mine"


def test_a_run_folder_that_may_not_be_written(refused, tmp_path, monkeypatch):
    """As the superuser, whom the kernel does not refuse, these tests ask a kernel that does."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    refused(f"run_dir={tmp_path}/a/b: nothing can be written in {tmp_path} by this user", run_dir=f"{tmp_path}/a/b")


def test_a_run_folder_that_the_system_refuses(refused):
    refused("run_dir=/proc/run cannot be made (No such file or directory)", run_dir="/proc/run")


HOLD = """
import sys, time
from jaxrl_post.run_dir import Claim
claim = Claim(sys.argv[1])
print("held", flush=True)
time.sleep(1000)
"""


def test_a_run_folder_that_another_run_is_writing(refused, tmp_path):
    """The kernel lets go of it when that one is killed."""
    run_dir = str(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", HOLD, run_dir], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        refused(f"run_dir={run_dir} is in use by another run (process {other.pid} on ", "give another run_dir")
        other.kill()
    Claim(run_dir).close()
    assert (tmp_path / "run" / ".lock").read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize(("limit", "width"), [(47, 47), (48, 48), (64, 48)])
def test_the_columns_for_prompts_stay_within_the_limit_rows_are_sized_by(tmp_path, limit, width):
    """The longest prompt has 47 bytes."""
    changes = SMALL | {"data.max_prompt_tokens": limit, "data.task.template": f"'{26 * 'x'} {{a}}{{b}}'"}
    job = build(recipes.load(TINY, [f"run_dir={tmp_path}", *(f"{k}={v}" for k, v in changes.items())]))
    assert max(len(prompt.ids) for prompt in job.train_prompts) <= limit
    assert job.prompt_width == width


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of one step; its name has a space and letters beyond ASCII."""
    run_dir = tmp_path_factory.mktemp("runs") / "a run ü"
    assert main([TINY, f"run_dir={run_dir}", *(f"{k}={v}" for k, v in SMALL.items())]) == 0
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"seed": 7}, ["another seed", "another run_dir"]),
        ({"data.task.high": 8}, ["other prompts"]),
        (
            {"model.random.hidden_size": 32},
            ["opt_state/mu/embed is (264, 64) float32", "and 25 more"],
        ),
        ({"model.random.family": "qwen3"}, ["params/layers/k_norm (2, 16) is not in the checkpoint"]),
        ({"checkpoint.resume": "false"}, ["checkpoint.resume=true"]),
    ],
)
def test_a_folder_of_another_run_is_left_as_it_is(refused, run_dir, change, parts):
    refused(*parts, steps=2, **change)


@pytest.mark.parametrize("item", ["arrays", "host"])
def test_a_damaged_checkpoint_is_named_and_left_alone(refused, run_dir, item):
    for file in (run_dir / "checkpoints" / "1" / item).rglob("*"):
        if file.is_file():
            file.write_bytes(b"garbage")
    refused(str(run_dir / "checkpoints" / "1"), "remove it", steps=2)


def test_a_full_disk_leaves_the_recipe_that_was_there(run_dir, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = (run_dir / "config.yaml").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device; a restart goes on from its last step") as raised:
        write_config(recipes.load(TINY, ["steps=7"]), run_dir)
    assert raised.value.filename == str(run_dir)
    assert (run_dir / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda host: host.pop("data"), "KeyError: 'data'"),
        (lambda host: host.update(data=None), "TypeError: 'NoneType'"),
        (lambda host: host["data"].update(position={}), "KeyError: 'next_index'"),
    ],
)
def test_a_host_state_of_another_kind_is_named_and_left_alone(refused, run_dir, change, error):
    path = run_dir / "checkpoints" / "1" / "host" / "metadata"
    host = json.loads(path.read_text())
    change(host)
    path.write_text(json.dumps(host))
    refused(f"{path.parent} is not what a run of this kind saves ({error}", "remove that checkpoint", steps=2)


def test_a_torn_and_a_strange_line_of_metrics_do_not_stop_a_resume(run_dir):
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n[1]\n{"step": "x"}\n' + b"[" * 100_000 + b'\n{"step": 2, "act')
    with MetricsWriter(run_dir, resume_step=1) as writer:
        writer.write(2, {})
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()] == [1, 2]
