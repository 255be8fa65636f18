"""Prompts: what is dropped, empty ones, and a stream that resumes exactly."""

import collections
import json
import pathlib
import subprocess
import sys

import pytest

from jaxrl_post import config
from jaxrl_post.data.prompts import PromptStream, prepare
from jaxrl_post.data.tokenizer import ByteTokenizer, FolderTokenizer
from jaxrl_post.types import Prompt

PLAIN = config.Data(chat=False)


def prompts(count):
    return [Prompt((i,), str(i), {}) for i in range(count)]


def take(stream, batches):
    return [prompt.ids[0] for _ in range(batches) for prompt in stream.next()]


def test_text_becomes_one_user_turn():
    data = config.Data(system_prompt="Be brief.")
    [prompt], report = prepare([{"prompt": "1+1?", "answer": "2"}], ByteTokenizer(), data)
    assert prompt.text == "system: Be brief.\nuser: 1+1?\nassistant: "
    assert prompt.ids == tuple(prompt.text.encode())
    assert prompt.row["answer"] == "2"
    assert (report.rows, report.kept, report.too_long, report.longest) == (1, 1, 0, len(prompt.ids))


def test_a_conversation_keeps_its_own_system_turn():
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]
    [prompt], _ = prepare([{"messages": messages}], ByteTokenizer(), config.Data(system_prompt="other"))
    assert prompt.text == "system: own\nuser: q\nassistant: "


def test_plain_text_takes_bos_where_the_tokenizer_asks_for_it(make_folder):
    tokenizer = FolderTokenizer(make_folder(adds_bos=True))
    [prompt], _ = prepare([{"prompt": "user"}], tokenizer, PLAIN)
    assert prompt.ids == (1, *tokenizer.encode("user"))
    [prompt], _ = prepare([{"prompt": "user"}], ByteTokenizer(), PLAIN)
    assert prompt.ids == tuple(b"user")


def test_over_long_prompts_are_dropped_and_counted():
    data = config.Data(chat=False, max_prompt_tokens=3)
    kept, report = prepare([{"prompt": text} for text in ("abc", "abcd", "é", "éé")], ByteTokenizer(), data)
    assert [prompt.text for prompt in kept] == ["abc", "é"]
    assert (report.rows, report.kept, report.too_long, report.shortest, report.longest) == (4, 2, 2, 2, 4)


def test_nothing_left_says_how_to_go_on():
    rows = [{"prompt": "x" * n} for n in (9, 7, 8)]
    expected = r"my\.jsonl: 3 rows read, 3 dropped .*data\.max_prompt_tokens=5.* shortest has 7 tokens"
    with pytest.raises(ValueError, match=expected):
        prepare(rows, ByteTokenizer(), config.Data(chat=False, max_prompt_tokens=5), "my.jsonl")
    with pytest.raises(ValueError, match=r"my\.jsonl has no rows"):
        prepare([], ByteTokenizer(), PLAIN, "my.jsonl")


def test_empty_prompt_acts_as_bos_or_is_refused(make_folder):
    rows = [{"prompt": "a"}, {"prompt": ""}]
    assert [prompt.ids for prompt in prepare(rows, ByteTokenizer(), PLAIN)[0]] == [(97,), (256,)]
    with pytest.raises(ValueError, match=r"data\.task, row 1: the prompt has no tokens"):
        prepare(rows, FolderTokenizer(make_folder({"bos_token": None})), PLAIN)


def test_settings_that_could_not_act_are_refused(make_folder):
    with pytest.raises(ValueError, match=r"row 0: `messages` need a chat template"):
        prepare([{"messages": [{"role": "user", "content": "x"}]}], ByteTokenizer(), PLAIN)
    with pytest.raises(ValueError, match=r"data\.system_prompt needs a chat template"):
        prepare([{"prompt": "x"}], ByteTokenizer(), config.Data(chat=False, system_prompt="s"))
    with pytest.raises(ValueError, match=r"row 0: no chat template.*data\.chat=false"):
        prepare([{"prompt": "x"}], FolderTokenizer(make_folder()), config.Data())


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("save_after", range(14))
def test_every_resume_continues_the_uninterrupted_list(save_after, shuffle):
    def stream():
        return PromptStream(prompts(20), batch=3, seed=5, shuffle=shuffle)

    whole, first = take(stream(), 14), stream()
    before = take(first, save_after)
    state = json.loads(json.dumps(first.state()))
    take(first, 2)  # going on must not change a saved state
    resumed = stream()
    resumed.restore(state)
    assert before + take(resumed, 14 - save_after) == whole


def test_resume_in_another_process_with_another_batch_size():
    first = PromptStream(prompts(7), batch=4, seed=2**32 - 1, shuffle=True)
    take(first, 3)
    program = """
import json, sys
from tests.data.test_prompts import PromptStream, prompts, take
stream = PromptStream(prompts(7), batch=2, seed=2**32 - 1, shuffle=True)
stream.restore(json.loads(sys.argv[1]))
print(take(stream, 6))
"""
    command = [sys.executable, "-c", program, json.dumps(first.state())]
    root = pathlib.Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert json.loads(result.stdout) == take(first, 3)


@pytest.mark.parametrize("batch", [1, 3, 5, 8, 25])
def test_every_epoch_holds_each_prompt_once(batch):
    ids = take(PromptStream(prompts(10), batch, seed=0, shuffle=True), 150 // batch)
    epochs = [ids[i : i + 10] for i in range(0, len(ids) - 9, 10)]
    assert len(epochs) >= 14
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 10  # shuffled anew


def test_order_follows_the_seed():
    def order(seed):
        return take(PromptStream(prompts(30), 6, seed, shuffle=True), 5)

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) == 8
    assert take(PromptStream(prompts(5), 2, 1, shuffle=False), 4) == [0, 1, 2, 3, 4, 0, 1, 2]


def test_fewer_prompts_than_a_batch_wrap_around():
    stream = PromptStream(prompts(2), batch=5, seed=0, shuffle=True)
    assert collections.Counter(take(stream, 2)) == {0: 5, 1: 5}


@pytest.mark.parametrize("other", [(prompts(21), 0, True), (prompts(20), 1, True), (prompts(20), 0, False)])
def test_a_position_in_another_order_is_refused(other):
    state = PromptStream(prompts(20), 4, 0, shuffle=True).state()
    with pytest.raises(ValueError, match=r"other prompts, another seed or another data\.shuffle"):
        PromptStream(other[0], 4, *other[1:]).restore(state)


def test_no_prompts_is_an_error():
    with pytest.raises(ValueError, match="needs prompts"):
        PromptStream([], 4, 0, shuffle=True)
