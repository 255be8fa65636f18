"""Rows become prompts, answers and masks: ends of turns, prefixes, cuts, and what is refused."""

import json

import pytest

from jaxrl_post import config_offline as kinds
from jaxrl_post.config import Model
from jaxrl_post.data.chat_template import compile_template
from jaxrl_post.data.conversations import conversation, split_turns
from jaxrl_post.data.preferences import cut_all, load_examples, mismatched
from jaxrl_post.data.tokenizer import ByteTokenizer
from jaxrl_post.types_offline import Answer, Example

DATA = kinds.OfflineData(path="x")
END = 257


class EndMarks(ByteTokenizer):
    """A byte tokenizer that spells its end token `<e>`, with any template."""

    def __init__(self, template):
        self._render = compile_template(template, "test")

    def encode(self, text, add_bos=False):
        ids = [ByteTokenizer.encode(self, part) for part in text.split("<e>")]
        return sum(([END, *part] for part in ids[1:]), ids[0])


MARKED = EndMarks(
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<e>|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
FORGETFUL = EndMarks(
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content if loop.last or m.role == 'user' else '' }}<e>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def spelt(example, tokenizer=MARKED):
    """Learned tokens as text, with ^ for the end token and _ where a token is context."""
    answer = example.answers[0]
    letters = ["^" if i == END else chr(i) for i in answer.ids]
    return "".join(c if trained else "_" for c, trained in zip(letters, answer.trained, strict=True))


def test_every_assistant_turn_is_learned_with_its_end_and_nothing_else():
    example = split_turns(TURNS, MARKED)
    assert bytes(i for i in example.prompt_ids if i != END) == b"u:one|a:"
    assert spelt(example) == "two^" + "_" * len("|u:three^|a:") + "four^"


def test_a_template_without_end_tokens_gets_one_after_the_last_turn():
    example = conversation({"messages": TURNS}, ByteTokenizer(), DATA)
    assert spelt(example) == "two\n" + "_" * len("user: three\nassistant: ") + "four\n^"


def test_later_turns_of_the_user_are_not_kept():
    assert split_turns([*TURNS, {"role": "user", "content": "five"}], MARKED) == split_turns(TURNS, MARKED)


def test_the_system_prompt_goes_before_conversations_without_one():
    data = kinds.OfflineData(path="x", system_prompt="be kind")
    example = conversation({"messages": TURNS}, MARKED, data)
    text = "".join("^" if i == END else chr(i) for i in example.prompt_ids)
    assert text == "s:be kind^|u:one^|a:"
    own = [{"role": "system", "content": "x"}, *TURNS]
    assert conversation({"messages": own}, MARKED, data) == split_turns(own, MARKED)


def test_a_template_that_rewrites_earlier_turns_is_refused():
    with pytest.raises(ValueError, match=r"up to message 1 \(assistant\) differently"):
        split_turns(TURNS, FORGETFUL)
    assert spelt(split_turns(TURNS[:2], FORGETFUL)) == "two^"


def test_plain_text_is_fed_as_it_is_and_ended():
    data = kinds.OfflineData(path="x", chat=False)
    example = conversation({"prompt": "ab", "completion": "cd"}, ByteTokenizer(), data)
    assert example == Example((97, 98), (Answer((99, 100, END), (True,) * 3),))
    ended = conversation({"prompt": "ab", "completion": "c<e>d<e>"}, MARKED, data)
    assert ended.answers[0] == Answer((99, END, 100, END), (True,) * 4)


def drawn(prompt, *answers):
    return Example(tuple(range(prompt)), tuple(Answer(tuple(range(n)), (True,) * n) for n in answers))


def test_pairs_are_cut_side_by_side_and_dropped_when_an_answer_is_lost():
    kept, report = cut_all([drawn(12, 3, 5), drawn(4, 2, 9), drawn(6, 2, 2)], 8)
    assert [tuple(a.length for a in example.answers) for example in kept] == [(2, 4), (2, 2)]
    assert report == (2, 1, 1)


def test_a_conversation_whose_learned_tokens_are_all_cut_is_dropped():
    example = Example((1, 2), (Answer((3, 4, 5), (False, False, True)),))
    assert cut_all([example], 4)[1] == (0, 1, 0)


def test_mismatched_answers_come_from_the_example_before():
    examples = [Example((i,), (Answer((10 * i, 10 * i + 1), (True, True)),)) for i in (1, 2, 3)]
    assert [e.answers[0].ids for e in mismatched(examples, 2)] == [(30,), (10,), (20,)]
    assert [e.prompt_ids for e in mismatched(examples, 9)] == [(1,), (2,), (3,)]


def config(path, kind, **data):
    return kinds.OfflineConfig.model_validate(
        {"model": Model(path="m"), "data": {"path": str(path), **data}, "algorithm": {"kind": kind}}
    )


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("dpo", {"prompt": "a", "chosen": "b"}, r"row 0: lacks rejected; it has"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": 3}, r"row 0: an answer is text or a list of one"),
        ("reward_model", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, r"margin='1' is not a finite"),
        ("kto", {"prompt": "a", "completion": "b", "label": 1}, r"label=1 must be true or false"),
        ("sft", {"messages": [{"role": "user", "content": "x"}]}, r"no message has role assistant"),
        ("sft", {"prompt": "a"}, r"needs `prompt` and `completion`, or `messages`"),
    ],
)
def test_rows_of_another_form_are_refused_by_number_or_skipped(tmp_path, kind, row, message):
    good = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "b", "label": True}
    path = written(tmp_path, row, good)
    with pytest.raises(ValueError, match=message) as caught:
        load_examples(config(path, kind), ByteTokenizer())
    assert "data.on_bad_row=skip" in str(caught.value)
    examples, report, skipped = load_examples(config(path, kind, on_bad_row="skip"), ByteTokenizer())
    assert (len(examples), report.kept, len(skipped)) == (1, 1, 1)


def test_broken_lines_and_missing_files_name_the_key(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path='nowhere' does not exist"):
        load_examples(config("nowhere", "sft"), ByteTokenizer())
    path = tmp_path / "rows.jsonl"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*set data\.on_bad_row=skip"):
        load_examples(config(path, "sft"), ByteTokenizer())


def test_no_example_left_is_an_error(tmp_path):
    path = written(tmp_path, {"prompt": "a long prompt", "chosen": "b", "rejected": "c"})
    with pytest.raises(ValueError, match=r"1 rows read, 0 skipped, 1 dropped .*data\.max_tokens=8, none left"):
        load_examples(config(path, "dpo", max_tokens=8), ByteTokenizer())


def test_conversational_pairs_equal_text_pairs(tmp_path):
    message = lambda role, content: [{"role": role, "content": content}]
    text = {"prompt": "a", "chosen": "b", "rejected": "c"}
    chat = {k: message("user" if k == "prompt" else "assistant", v) for k, v in text.items()}
    made = load_examples(config(written(tmp_path, text, chat), "dpo"), ByteTokenizer())[0]
    assert made[0] == made[1]
    assert bytes(made[0].prompt_ids) == b"user: a\nassistant: "
    assert made[0].answers[1].ids == (*b"c\n", END)
