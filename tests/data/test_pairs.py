"""Samples of a run as preference pairs and as answers to imitate."""

import json

import pytest

from jaxrl_post.data.pairs import Question, imitation_rows, preference_rows, read_questions
from launch.pairs import pairs


def sample(prompt, completion, reward, stop="stop"):
    return {"row": {"prompt": prompt, "answer": "4"}, "completion": completion, "reward": reward, "stop": stop}


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    steps = [
        [sample("2+2", "4", 1.0), sample("2+2", "5", 0.0), sample("1+3", "four", 0.0)],
        [
            sample("2+2", "4", 1.0),
            sample("2+2", "it is 4", 1.0),
            sample("2+2", "3", 0.0),
            sample("2+2", "22", 0.0),
            sample("2+2", "4 and so", 1.0, "length"),
            sample("2+2", "no\u2028end", 0.0, "length"),
        ],
    ]
    for number, lines in enumerate(steps, start=1):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"step_{number:06d}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path / "run"


def test_questions_collect_distinct_finished_answers_over_all_steps(run_dir):
    first, second = read_questions(run_dir / "rollouts", threshold=1.0)
    assert first == Question({"prompt": "2+2", "answer": "4"}, ("4", "it is 4"), ("5", "3", "22"))
    assert (second.right, second.wrong) == ((), ("four",))


def test_the_threshold_says_what_is_right(run_dir):
    first, _ = read_questions(run_dir / "rollouts", threshold=0.0)
    assert (first.right, first.wrong) == (("4", "5", "it is 4", "3", "22"), ())


def test_every_wrong_answer_meets_a_right_one_and_counts_are_bounded(run_dir):
    questions = read_questions(run_dir / "rollouts", threshold=1.0)
    rows = list(preference_rows(questions, per_question=8))
    assert [(r["chosen"], r["rejected"]) for r in rows] == [("4", "5"), ("it is 4", "3"), ("4", "22")]
    assert all(r["prompt"] == "2+2" and r["answer"] == "4" for r in rows)
    assert len(list(preference_rows(questions, per_question=1))) == 1
    assert [r["completion"] for r in imitation_rows(questions, per_question=1)] == ["4"]


def test_a_chat_row_gets_the_answer_as_its_last_turn():
    turn = {"role": "user", "content": "2+2"}
    (row,) = imitation_rows([Question({"messages": [turn]}, ("4",), ())], per_question=3)
    assert row == {"messages": [turn, {"role": "assistant", "content": "4"}]}


def test_the_command_writes_both_files_or_nothing(run_dir, tmp_path):
    pairs(run_dir, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["preferences.jsonl", "right.jsonl"]
    assert len((tmp_path / "out" / "preferences.jsonl").read_text().splitlines()) == 3
    with pytest.raises(ValueError, match="already exists"):
        pairs(run_dir, tmp_path / "out")
    with pytest.raises(ValueError, match=r"reward of 2\.0 or more: lower --threshold"):
        pairs(run_dir, tmp_path / "none", threshold=2.0)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no sample of a run: Expecting"),
        ("[1]", "lacks row"),
        ('{"row": {}, "stop": "stop"}', "lacks completion and reward"),
    ],
)
def test_a_line_that_is_no_sample_is_named(run_dir, line, why):
    (run_dir / "rollouts" / "step_000003.jsonl").write_text(line)
    with pytest.raises(ValueError, match=f"step_000003.jsonl:1 .*{why}"):
        read_questions(run_dir / "rollouts", threshold=1.0)


def test_a_run_without_samples_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dump_rollouts=true"):
        pairs(tmp_path, tmp_path / "out")
