"""Graders: what scores, what is refused at the start, and what a broken grader says."""

import sys

import numpy as np
import pytest

from jaxrl_post import config, config_rewards
from jaxrl_post.data.tasks import load_task
from jaxrl_post.data.tokenizer import ByteTokenizer
from jaxrl_post.rewards.call import RewardError
from jaxrl_post.rewards.gym import extract_answer
from jaxrl_post.rewards.model import Setting
from jaxrl_post.rewards.reward import build_reward
from jaxrl_post.types import Prompt, Response

SETTING = Setting(config.Mesh(), ByteTokenizer(), ByteTokenizer.vocab_size, max_tokens=64, samples=4)


STRICT = {"workers": 0, "failure_score": None, "per": "step"}  # in this process, all at once; a failure is an error
IN_PROCESS = {"kind": "reasoning_gym", "workers": 0}


def build(reward_config):
    return build_reward(reward_config, SETTING)


def responses(completions, rows):
    pairs = zip(completions, rows, strict=True)
    return [Response(Prompt((1,), row.get("prompt", "q"), row), text, np.array([2])) for text, row in pairs]


def score(reward_config, completions, rows):
    return build(reward_config)(responses(completions, rows)).total_N.tolist()


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("3 + 4 = 7", "7", 1.0),
        ("7 is 3 + 4", "7", 0.0),
        ("The answer is 007.", 7, 1.0),
        ("seven", "7", 0.0),
        ("", "0", 0.0),
        ("= -3", "-3", 1.0),
        ("\u22123", "-3", 1.0),
        ("= 3", "-3", 0.0),
        ("10-7", "7", 1.0),
        ("(1)-7", "7", 1.0),
        ("answer:-7", "-7", 1.0),
        ("-0", "0", 1.0),
        ("1,234", "234", 1.0),
        ("2.50", "50", 1.0),
        ("٣", "3", 0.0),
        ("9" * 5000, "9", 0.0),
        ("<b>12</b>", " 12 ", 1.0),
    ],
)
def test_last_number(completion, answer, expected):
    assert score(config_rewards.LastNumberReward(), [completion], [{"answer": answer}]) == [expected]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"), [(" yes\n", "yes ", 1.0), ("Yes", "yes", 0.0), ("2", 2, 1.0), ("", "x", 0.0)]
)
def test_exact_match(completion, answer, expected):
    assert score(config_rewards.ExactMatchReward(kind="exact_match"), [completion], [{"answer": answer}]) == [expected]


def test_prompts_and_completions_are_aligned():
    rows = [{"answer": str(n)} for n in range(4)]
    assert score(config_rewards.LastNumberReward(), ["0", "2", "2", "0"], rows) == [1.0, 0.0, 1.0, 0.0]
    assert score(config_rewards.LastNumberReward(), [], []) == []


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "second"}, r"has no `answer` \(data\.task\.answer_key\); its keys are \['prompt'\]"),
        ({"prompt": "second", "answer": None}, "answer=None, which is neither"),
        ({"prompt": "second", "answer": True}, "answer=True, which is neither"),
        ({"prompt": "second", "answer": "#### 7"}, "answer='#### 7', which is not an integer"),
        ({"prompt": "second", "answer": 1.5}, "answer=1.5, which is not an integer"),
    ],
)
def test_rows_that_cannot_be_graded_are_named_at_the_start(row, why):
    reward = build(config_rewards.LastNumberReward())
    with pytest.raises(ValueError, match=rf"reward last_number: row 1 \('second'\) .*{why}"):
        reward.check_rows([{"prompt": "first", "answer": "-3"}, row])
    reward.check_rows([{"prompt": "first", "answer": " 12"}, {"messages": [], "answer": 5}])


def test_exact_match_takes_any_text_and_needs_an_answer():
    reward = build(config_rewards.ExactMatchReward(kind="exact_match"))
    reward.check_rows([{"answer": "#### 7"}, {"answer": 1.5}])
    with pytest.raises(ValueError, match=r"exact_match: row 0 .*no `answer`"):
        reward.check_rows([{"messages": [{"role": "user", "content": "q"}]}])


def gym_task(dataset, **options):
    return config.ReasoningGymTask(kind="reasoning_gym", dataset=dataset, size=4, held_out=1, options=options)


def test_extract_answer_takes_the_last_complete_one():
    assert extract_answer("<answer>1</answer> so <answer>\n2 </answer>!") == "2"
    assert extract_answer("<answer>a <answer>3</answer> <answer>4") == "3"
    assert extract_answer(" 5 ") == "5"


def test_reasoning_gym_scores_and_threshold():
    rows = list(load_task(gym_task("chain_sum"), seed=1).train)
    binary = config_rewards.ReasoningGymReward(**IN_PROCESS)
    partial = config_rewards.ReasoningGymReward(**IN_PROCESS, threshold=None)
    build(binary).check_rows(rows)
    right = rows[0]["answer"]
    rambling = f"it is {right}"
    texts = [f"I think <answer> {right} </answer>.", right, rambling, "none"]
    assert score(binary, texts, [rows[0]] * 4) == [1.0, 1.0, 0.0, 0.0]
    # The scorer pays len(answer) / len(text) where the answer is a part of the text.
    assert score(partial, texts, [rows[0]] * 4) == [1.0, 1.0, pytest.approx(len(right) / len(rambling)), 0.0]


def test_reasoning_gym_scorer_that_cannot_parse_scores_zero():
    row = load_task(gym_task("prime_factorization"), seed=1).train[0]
    reward = config_rewards.ReasoningGymReward(**IN_PROCESS, threshold=None)
    assert score(reward, ["hello", row["answer"]], [row, row]) == [0.0, 1.0]


def test_reasoning_gym_needs_its_own_rows():
    reward = build(config_rewards.ReasoningGymReward(**IN_PROCESS))
    with pytest.raises(
        ValueError, match=r"row 0 .*has no dataset, metadata, options: .*data\.task\.kind=reasoning_gym"
    ):
        reward.check_rows([{"prompt": "q", "answer": "3"}])


@pytest.fixture
def grader(tmp_path, monkeypatch):
    """grader(body) -> config of a reward function with that body, in a module of its own."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(body, name="score"):
        (tmp_path / "my_grader.py").write_text(f"def score(prompts, completions, rows):\n    {body}\n\nVALUE = 3\n")
        sys.modules.pop("my_grader", None)
        return config_rewards.FunctionReward(kind="function", function=f"my_grader:{name}", **STRICT)

    yield make
    sys.modules.pop("my_grader", None)


ROWS = [{"prompt": "p0", "n": 1}, {"prompt": "p1", "n": 2}]


def test_a_function_gets_aligned_lists(grader):
    body = "return [len(p) + 10 * len(c) + 100 * r['n'] for p, c, r in zip(prompts, completions, rows)]"
    assert score(grader(body), ["", "abc"], ROWS) == [102.0, 232.0]


def test_numpy_scores_become_floats(grader):
    scores = score(grader("import numpy as np; return np.asarray([True, False])"), ["a", "b"], ROWS)
    assert scores == [1.0, 0.0]
    assert all(type(s) is float for s in scores)
    [half] = score(grader("import numpy as np; return np.full(1, 0.5, np.float32)"), ["a"], ROWS[:1])
    assert half == np.float64(0.5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "returned 1 scores for 2 completions"),
        ("return 1.0", "returned 1.0, not a list of 2 numbers, one for each completion"),
        ("pass", "returned None, not a list of 2 numbers"),
        ("return [1.0, None]", r"sample 1 \('bb'\): returned None, not a finite number"),
        ("return [float('nan'), 1]", r"sample 0 \('aa'\): returned nan"),
        ("return [1, float('inf')]", r"sample 1 \('bb'\): returned inf"),
        ("return ['1', 1]", r"sample 0 \('aa'\): returned '1'"),
        ("raise KeyError('gone')", r"sample 0 \('aa'\): raised KeyError: 'gone'"),
    ],
)
def test_broken_functions_are_named(grader, body, message):
    with pytest.raises(RewardError, match=f"reward my_grader:score.*{message}"):
        score(grader(body), ["aa", "bb"], ROWS)


def test_a_failing_grader_names_its_sample():
    rows = [{"answer": "1"}, {}]
    with pytest.raises(RewardError, match=r"reward last_number, sample 1 \('2'\): raised KeyError: 'answer'"):
        score(config_rewards.LastNumberReward(), ["1", "2"], rows)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:f", "importing module 'no_such_module' failed: ModuleNotFoundError"),
        ("my_grader:scores", "module 'my_grader' has no 'scores'; it has score"),
        ("my_grader:VALUE", "'VALUE' is 3, not a plain function"),
        ("jaxrl_post.rewards.match:last_number", r"must take \(prompts, completions, rows\), but has \(completion"),
    ],
)
def test_functions_that_cannot_be_used_are_refused_at_the_start(grader, function, message):
    grader("return []")
    with pytest.raises(ValueError, match=rf"reward\.function='{function}': .*{message}"):
        build(config_rewards.FunctionReward(kind="function", function=function))


def test_a_module_that_fails_on_import(grader, tmp_path):
    reward = grader("return []")
    (tmp_path / "my_grader.py").write_text("import missing_dependency\n")
    with pytest.raises(ValueError, match=r"importing module 'my_grader' failed: .*missing_dependency"):
        build(reward)


@pytest.fixture
def graders(tmp_path, monkeypatch):
    """graders(name=(weight, body), ...) -> a weighted reward of functions with those bodies."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(**parts):
        for name, (_, body) in parts.items():
            (tmp_path / f"part_{name}.py").write_text(f"def score(prompts, completions, rows):\n    {body}\n")
            sys.modules.pop(f"part_{name}", None)
        sections = {
            name: {"weight": weight, "reward": {"kind": "function", "function": f"part_{name}:score", **STRICT}}
            for name, (weight, _) in parts.items()
        }
        return config_rewards.WeightedReward.model_validate({"kind": "weighted", "parts": sections})

    return make


def test_a_weighted_reward_is_the_sum_of_its_parts_which_stay_known(graders):
    reward = build(graders(right=(2.0, "return [1, 0, 1]"), long=(-0.5, "return [None, 4, len(completions[2])]")))
    scores = reward(responses(["a", "b", "ccc"], [{}] * 3))
    assert reward.names == ("right", "long")
    np.testing.assert_array_equal(scores.heads_NK, [[1, np.nan], [0, 4], [1, 3]])
    np.testing.assert_array_equal(scores.total_N, [2.0, -2.0, 0.5])


def test_a_sample_that_no_part_grades_is_named(graders):
    reward = build(graders(one=(1.0, "return [1, None]"), other=(1.0, "return [None, None]")))
    with pytest.raises(RewardError, match=r"sample 1 \('bb'\): all rewards \(one, other\) returned None"):
        reward(responses(["aa", "bb"], [{}] * 2))
    broken = build(graders(one=(1.0, "return [1]"), other=(1.0, "return [float('nan')]")))
    with pytest.raises(RewardError, match=r"reward other, sample 0 \('aa'\): returned nan"):
        broken(responses(["aa"], [{}]))


def test_a_part_that_cannot_be_used_is_named_by_its_section(graders):
    reward = graders(one=(1.0, "return [1]"), other=(1.0, "return [1]"))
    sys.modules.pop("part_other", None)
    other = config_rewards.FunctionReward(kind="function", function="part_other:gone")
    parts = dict(reward.parts) | {"other": config_rewards.RewardPart(reward=other)}
    with pytest.raises(ValueError, match=r"reward\.parts\.other\.reward\.function='part_other:gone'"):
        build(reward.model_copy(update={"parts": parts}))
    mixed = {"right": {"reward": {"kind": "last_number"}}}
    with pytest.raises(ValueError, match=r"reward right: row 0 .*no `answer`"):
        build(config_rewards.WeightedReward.model_validate({"kind": "weighted", "parts": mixed})).check_rows([{}])


def test_digit_fraction():
    reward = config_rewards.FunctionReward(kind="function", function="jaxrl_post.rewards.text:digit_fraction", **STRICT)
    assert score(reward, ["12ab", "", "7"], [{}] * 3) == [0.5, 0.0, 1.0]
