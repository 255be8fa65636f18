"""Tasks: arithmetic splits, JSON-lines files in every state, procedural rows."""

import json
import sys

import pytest

from jaxrl_post import config
from jaxrl_post.data.jsonl import read_rows
from jaxrl_post.data.tasks import load_task


def write(tmp_path, content, name="rows.jsonl"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def jsonl(path, **options):
    return config.JsonlTask(kind="jsonl", path=str(path), **options)


def test_addition_holds_out_a_fixed_fifth():
    task = load_task(config.ArithmeticTask())
    assert (len(task.train), len(task.held_out)) == (64, 17)
    # (7·1 + 3·1) = 10 is held out, (7·1 + 3·2) = 13 is trained on.
    assert task.held_out[0] == {"prompt": "What is 1 + 1? Answer with just the number.", "answer": "2"}
    assert task.train[0] == {"prompt": "What is 1 + 2? Answer with just the number.", "answer": "3"}
    prompts = {row["prompt"] for row in [*task.train, *task.held_out]}
    assert len(prompts) == 81


@pytest.mark.parametrize(("operation", "symbol", "answer"), [("subtract", "-", "-1"), ("multiply", "*", "2")])
def test_other_operations(operation, symbol, answer):
    row = load_task(config.ArithmeticTask(operation=operation, template="{a}{op}{b}=")).train[0]
    assert row == {"prompt": f"1{symbol}2=", "answer": answer}


def test_a_range_with_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match=r"data\.task\.low=3 and data\.task\.high=3 leave no pair"):
        load_task(config.ArithmeticTask(low=3, high=3))


def test_awkward_file_gives_the_rows_of_the_clean_one(tmp_path):
    rows = [
        {"prompt": "line\u2028separator \x85 next", "answer": "1"},
        {"prompt": "emoji 🎉 é", "answer": 2},
        {"messages": [{"role": "user", "content": "hi\r\n"}], "answer": "3", "level": 5},
    ]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    awkward = b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n  \n" + lines[1] + b"\r\n" + lines[2]
    assert read_rows(write(tmp_path, awkward), jsonl("x")) == (rows, [])
    escaped = "\n".join(json.dumps(row) for row in rows)
    assert read_rows(write(tmp_path, escaped), jsonl("x")) == (rows, [])


def test_keys_are_renamed_and_unnamed_columns_stay_out_of_the_way(tmp_path):
    path = write(tmp_path, '{"question": "q", "solution": 7, "prompt": "other", "answer": "other", "id": 1}\n')
    task = load_task(jsonl(path, prompt_key="question", answer_key="solution"))
    assert list(task.train) == [{"question": "q", "solution": 7, "id": 1, "answer": 7, "prompt": "q"}]
    assert "answer" not in load_task(jsonl(path, answer_key="missing")).train[0]


def test_conversations(tmp_path):
    messages = [{"role": "user", "content": "q"}]
    rows = [{"prompt": messages}, {"messages": messages}, {"prompt": None, "messages": messages}]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)))
    assert list(load_task(jsonl(path)).train) == [{"messages": messages}] * 3


BAD = {
    "not json": "Expecting value",
    '["a"]': "a list, not a JSON object",
    '{"text": "x"}': r"neither 'prompt' .* nor 'messages'; keys: \['text'\]",
    '{"prompt": 3}': "not 3",
    '{"prompt": []}': r"not \[\]",
    '{"messages": [{"role": "user"}]}': "list of messages",
    '{"prompt": "\\ud83c"}': "surrogates not allowed",
    "[" * 100_000: "recursion",
}


@pytest.mark.parametrize(("line", "why"), BAD.items(), ids=range(len(BAD)))
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, line, why):
    path = write(tmp_path, '{"prompt": "ok"}\n\n' + line + '\n{"prompt": "ok too"}\n')
    with pytest.raises(ValueError, match=rf"rows\.jsonl:3: .*{why}.*on_bad_row=skip"):
        load_task(jsonl(path))
    task = load_task(jsonl(path, on_bad_row="skip"))
    assert [row["prompt"] for row in task.train] == ["ok", "ok too"]
    assert len(task.dropped) == 1
    assert task.dropped[0].startswith(f"{path}:3: ")


def test_latin1_bytes_are_a_bad_line(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: 'utf-8' codec"):
        load_task(jsonl(write(tmp_path, '{"prompt": "é"}'.encode("latin-1"))))


def test_missing_folder_empty_and_exhausted_files(tmp_path):
    with pytest.raises(ValueError, match=r"data\.task\.path=.*none\.jsonl' does not exist"):
        load_task(jsonl(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"data\.task\.path=.* is a folder"):
        load_task(jsonl(tmp_path))
    with pytest.raises(ValueError, match=r"rows\.jsonl' has no rows: 0 read, 0 dropped"):
        load_task(jsonl(write(tmp_path, b"\xef\xbb\xbf\r\n\n")))
    with pytest.raises(ValueError, match=r"has no rows: 2 read, 2 dropped \(first: .*rows\.jsonl:1: "):
        load_task(jsonl(write(tmp_path, "1\n2\n"), on_bad_row="skip"))


def test_held_out_file_is_read_and_named(tmp_path):
    train, held_out = write(tmp_path, '{"prompt": "a"}'), write(tmp_path, '{"prompt": "b"}\n3\n', "held.jsonl")
    task = load_task(jsonl(train, held_out_path=str(held_out), on_bad_row="skip"))
    assert [row["prompt"] for row in task.held_out] == ["b"]
    assert task.dropped[0].startswith(f"{held_out}:2: ")
    with pytest.raises(ValueError, match=r"data\.task\.held_out_path=.*does not exist"):
        load_task(jsonl(train, held_out_path=str(tmp_path / "no")))


def gym(dataset="chain_sum", **options):
    return config.ReasoningGymTask(kind="reasoning_gym", dataset=dataset, size=5, held_out=3, options=options)


def test_procedural_rows_depend_on_seed_and_index():
    task = load_task(gym(min_terms=2, max_terms=2), seed=7)
    assert (len(task.train), len(task.held_out)) == (5, 3)
    again = load_task(gym(min_terms=2, max_terms=2), seed=7)
    assert [*task.train, *task.held_out] == [again.train[i] for i in range(5)] + [again.held_out[i] for i in range(3)]
    assert task.train[-1] == task.train[4]
    assert {row["prompt"] for row in task.train} != {row["prompt"] for row in load_task(gym(), seed=8).train}
    row = task.train[0]
    expression = row["prompt"].rsplit(":", 1)[1].strip(" =")
    assert sum(int(t) for t in expression.replace("- ", "+ -").split("+")) == int(row["answer"])
    with pytest.raises(IndexError):
        task.train[5]


def test_procedural_mistakes_are_named():
    with pytest.raises(ValueError, match=r"data\.task\.dataset='chain_sums' .*did you mean chain_sum"):
        load_task(gym("chain_sums"))
    with pytest.raises(ValueError, match=r"data\.task\.options has min_term, seed; 'chain_sum' takes .*min_terms"):
        load_task(gym(min_term=1, seed=3))
    with pytest.raises(ValueError, match=r"data\.task\.options=\{'min_terms': -1\} are refused by 'chain_sum'"):
        load_task(gym(min_terms=-1))


def test_missing_extra_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl-post\[tasks\]'"):
        load_task(gym())
