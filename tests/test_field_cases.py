"""Faults that only a whole run shows: prompts of every length, a temperature, a reference, two passes over a step."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from jaxrl_post import recipes
from jaxrl_post.data.tokenizer import FolderTokenizer
from jaxrl_post.loops.credit import to_trajectories
from jaxrl_post.loops.gather import grade
from jaxrl_post.loops.groups import Samples
from jaxrl_post.loops.job import build
from jaxrl_post.loops.online import run
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.rewards.reward import Scores
from jaxrl_post.rollout.sampler import Rollout
from jaxrl_post.training.packing import PackShape, pack
from jaxrl_post.types import Completion, Prompt, StopReason

TINY = Path(__file__).parent.parent / "configs" / "tiny" / "grpo.yaml"
TIMED = ("timing_s/", "perf/", "compile/")
LENGTHS = (*range(17), *range(17), *range(17, 34), *range(17, 34))  # 17 a step: short prompts first, then long ones


def recipe(folder, run_dir, *overrides):
    return recipes.load(
        TINY,
        [
            f"run_dir={run_dir}", "data.task.kind=jsonl", f"data.task.path={folder}/rows.jsonl", "data.chat=false",
            "data.shuffle=false", "data.prompts_per_step=17", "data.max_prompt_tokens=40",
            "rollout.samples_per_prompt=2", "rollout.max_new_tokens=4",
            "rollout.temperature=0.6", "reward.function=byte_sum_reward:score",
            "checkpoint.keep_last=9", "algorithm.epochs=2", "algorithm.kl.coef=0.1",
            "mesh.fsdp=1", "mesh.allow_unused_devices=true", *overrides,
        ],
    )  # fmt: skip


def rollouts(run_dir, step):
    return [json.loads(line) for line in (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def numbers(run_dir):
    records = read_metrics(run_dir / "metrics.jsonl")
    return [{k: v for k, v in record.items() if not k.startswith(TIMED)} for record in records]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts of 0 to 33 bytes, a reward that tells samples apart, and the run `straight` of four steps."""
    folder = tmp_path_factory.mktemp("cases")
    rows = [{"prompt": "abcdefghijklmnopqrstuvwxyz0123456789"[:n]} for n in LENGTHS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "byte_sum_reward.py").write_text(
        "def score(prompts, completions, rows):\n    return [sum(c.encode()) % 7 / 7 for c in completions]\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        run(recipe(folder, folder / "straight", "steps=4"))
        yield folder


def test_prompts_of_every_length_share_the_programs_of_the_first_steps(folder):
    """Steps 3 and 4 are the first with prompts longer than 16."""
    records = read_metrics(folder / "straight" / "metrics.jsonl")
    lengths = [{len(s["prompt_ids"]) for s in rollouts(folder / "straight", step)} for step in (1, 2, 3, 4)]
    assert lengths == [set(range(1, 17))] * 2 + [set(range(17, 34))] * 2
    assert records[0]["compile/count"] > 0
    assert [r["compile/count"] for r in records[2:]] == [0, 0]


def test_an_empty_prompt_is_sampled_from_as_bos(folder):
    samples = [s for step in (1, 2) for s in rollouts(folder / "straight", step) if not s["prompt"]]
    assert [s["prompt_ids"] for s in samples] == [[256]] * 4
    assert all(s["ids"] for s in samples)


def test_sampler_and_trainer_share_a_temperature_other_than_one(folder):
    """At temperature 1 the trainer's log-probs would be off by a large factor: logits vary by far more than 1e-4."""
    for record in read_metrics(folder / "straight" / "metrics.jsonl"):
        assert record["rollout_corr/logp_abs_diff_max"] < 1e-4


def test_the_second_pass_is_measured_against_the_samplers_log_probs(folder):
    """The metric is a mean of two passes, the first of which is on policy and counts 0."""
    for record in read_metrics(folder / "straight" / "metrics.jsonl"):
        assert abs(record["actor/ppo_kl"]) > 1e-4


def test_a_run_with_a_reference_resumes_bit_for_bit(folder):
    """The reference is the model the run started from, not the policy it resumes with."""
    shutil.copytree(folder / "straight", folder / "resumed")
    for step in (3, 4):
        shutil.rmtree(folder / "resumed" / "checkpoints" / str(step))
    run(recipe(folder, folder / "resumed", "steps=4"))
    assert numbers(folder / "resumed") == numbers(folder / "straight")
    for step in (1, 2, 3, 4):
        assert rollouts(folder / "resumed", step) == rollouts(folder / "straight", step)


def test_the_stop_ids_of_a_recipe_join_those_of_the_tokenizer(folder):
    job = build(recipe(folder, folder / "unused", "rollout.stop_token_ids=[10, 257]"))
    assert job.stop_ids == {10, 257}
    assert not (folder / "unused").exists()


def test_sampled_ids_are_trained_on_where_their_text_would_be_tokenised_otherwise(tmp_path):
    """The text ab as the ids of its letters; graders see the text, rows hold the ids with their own log-probs."""
    letters = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")])
    written = tokenizers.Tokenizer(letters)
    written.decoder = tokenizers.decoders.ByteLevel()
    written.add_special_tokens(["</s>"])
    written.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer, seen = FolderTokenizer(tmp_path), []
    assert tokenizer.encode("ab") == [2]
    scored = Scores(np.ones(1), np.ones((1, 1)))
    reward = lambda responses: seen.extend(responses) or scored
    job = SimpleNamespace(config=recipes.load(TINY, []), tokenizer=tokenizer, reward=reward)
    logp = np.array([-0.1, -1.2, -0.3], np.float32)
    sampled = Completion(0, np.array([0, 1, 3], np.int32), logp, logp, StopReason.STOP)
    prompt, rollout = Prompt((2,), "ab", {}), Rollout([sampled], (3,), (1,))
    texts, scores = grade(job, [prompt], rollout)
    assert texts == [response.text for response in seen] == ["ab"]
    trained = to_trajectories(Samples([prompt], rollout, texts, scores, np.array([True])), drop_truncated=False)
    batch, *_ = pack(trained, PackShape(1, 8, 8, 1), aggregation="token-mean", keep_all=True)
    assert batch.target[batch.mask].tolist() == [0, 1, 3]
    assert batch.tokens[0, 0, :4].tolist() == [2, 0, 1, 0]
    np.testing.assert_array_equal(batch.old_logp[batch.mask], logp)
