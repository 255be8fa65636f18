"""`launch sample`: streamed and batched text of a recipe's model and of a run are the sampler's."""

import json

import pytest

from jaxrl_post import recipes
from jaxrl_post.loops.offline import run as run_offline
from jaxrl_post.loops.policy import load_policy
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.schedule import SampleOptions
from launch.__main__ import main

TINY = "configs/tiny/grpo.yaml"
# A wide initialiser: greedy answers that do not hang on rounding.
SMALL = ["mesh.fsdp=1", "mesh.allow_unused_devices=true", "model.random.initializer_range=0.3"]
CHAT = "user: Hello\nassistant: "


@pytest.fixture(scope="module")
def greedy():
    """The in-graph engine's answers to two prompts, [ids] and logp."""
    policy = load_policy(recipes.load(TINY, SMALL), None)
    network = policy.network
    sampler = Sampler(network.graphdef, network.model, network.mesh, policy.stop_ids)
    prompts = [policy.tokenizer.encode(text) for text in (CHAT, CHAT.replace("Hello", "Bye"))]
    options = SampleOptions(max_new_tokens=12, temperature=0.0)
    found = sampler.generate(policy.params, prompts, options, seed=0, step=0).completions
    return [(c.ids.tolist(), policy.tokenizer.decode(c.ids)) for c in found]


def test_one_prompt_streams_to_the_terminal_and_is_kept_where_asked(greedy, tmp_path, capsys):
    to = tmp_path / "out.jsonl"
    words = ["--prompt", "Hello", "--max-tokens", "12", "--temperature", "0", "--stream", "--to", str(to)]
    assert main(["sample", TINY, *SMALL, *words]) == 0
    out, err = capsys.readouterr()
    ids, text = greedy[0]
    assert out == text + "\n"
    assert "a random model: 1 prompts × 1" in err
    line = json.loads(to.read_text())
    assert (line["prompt"], line["completion"], line["ids"]) == ("Hello", text, ids)
    assert line["stop"] == ("stop" if ids[-1] == 257 else "length")
    assert line["logp"] == [0.0] * len(ids)


def test_many_prompts_are_json_lines(greedy, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Bye"}]}\n')
    words = ["--prompt", "Hello", "--file", str(file), "--max-tokens", "12", "--temperature", "0"]
    assert main(["sample", TINY, *SMALL, *words]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["ids"], line["completion"]) for line in lines] == greedy
    assert lines[1]["prompt"] == [{"role": "user", "content": "Bye"}]
    assert main(["sample", TINY, *SMALL, "--prompt", "Hello", "--samples", "3", "--max-tokens", "12"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({tuple(line["ids"]) for line in lines}) == 3
    assert all(-20 < x < 0 for line in lines for x in line["logp"])


def test_a_run_answers_with_its_newest_weights(tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_offline(recipes.load("configs/tiny/sft.yaml", [f"run_dir={run_dir}", "steps=1", "evaluation.enabled=false"]))
    words = ["--prompt", "Hello", "--max-tokens", "4", "--temperature", "0", "--to", str(tmp_path / "out.jsonl")]
    capsys.readouterr()
    assert main(["sample", str(run_dir), *words]) == 0
    assert f"{run_dir}, step 1" in capsys.readouterr().err
    assert main(["sample", "configs/tiny/sft.yaml", "--weights", str(run_dir), *words[:-1], str(tmp_path / "b")]) == 0
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "b").read_text()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([TINY], "give --prompt TEXT or --file"),
        ([TINY, "--prompt", "x", "--prompt", "y", "--stream"], "--stream shows one sample, not 2 prompts"),
        ([TINY, "--file", "nothing.jsonl"], "--file='nothing.jsonl' does not exist"),
        (["configs/tiny/reward_model.yaml", "--prompt", "x"], "samples no text"),
        (["tests", "--prompt", "x"], "tests/config.yaml"),
        ([TINY, "--prompt", "x", "--weights", "tests"], "tests is not the folder of a run"),
    ],
)
def test_what_cannot_be_sampled_is_said_in_one_line(words, why, capsys):
    assert main(["sample", *words]) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([TINY, "--api-key-file", "pyproject.toml", "--host", "no.such.host.invalid"], "cannot listen on"),
        ([TINY, "--api-key-file", "nothing"], "nothing"),
        (["configs/tiny/reward_model.yaml", "--port", "0"], "samples no text"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(words, why, capsys):
    assert main(["serve", *words]) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "words", "why"),
    [
        ("sample", ["--samples", "0"], "--samples 0: expected 1 or more"),
        ("sample", ["--max-tokens", "0"], "--max-tokens 0: expected 1 or more"),
        ("sample", ["--temperature", "-1"], "--temperature -1.0: expected 0 or more"),
        ("sample", ["--temperature", "nan"], "--temperature nan: expected 0 or more"),
        ("serve", ["--slots", "0"], "--slots 0: expected 1 or more"),
        ("serve", ["--context", "1"], "--context 1: expected 2 or more"),
        ("serve", ["--max-queue", "-1"], "--max-queue -1: expected 0 or more"),
        ("serve", ["--timeout", "0"], "--timeout 0: expected more than 0 seconds"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_weights_are_read(command, words, why, capsys, monkeypatch):
    for module in ("launch.sample", "launch.serve"):
        monkeypatch.setattr(f"{module}.read_policy", lambda *_: pytest.fail("read"))
    assert main([command, TINY, *words, *(["--prompt", "x"] if command == "sample" else [])]) == 2
    assert capsys.readouterr().err == f"error: {why}\n"
