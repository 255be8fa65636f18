"""Prompts that rest: how often they are drawn, what clears them, and a position that goes on exactly."""

import json

import numpy as np
import pytest

from jaxrl_post.config import CurriculumOptions, Data
from jaxrl_post.data.curriculum import LEAST, prompt_source
from jaxrl_post.data.prompts import PromptStream
from jaxrl_post.data.stream import Stream
from jaxrl_post.types import Prompt

PROMPTS = [Prompt((i + 1,), f"p{i}", {"row": i}) for i in range(10)]


def source(chance=0.5, seed=3, prompts=PROMPTS, shuffle=True):
    data = Data(prompts_per_step=4, shuffle=shuffle, curriculum=CurriculumOptions(chance=chance))
    return prompt_source(prompts, data, seed)


def numbers(prompts):
    return [prompt.row["row"] for prompt in prompts]


def test_without_one_it_is_the_stream_and_with_one_it_begins_as_the_stream():
    assert isinstance(prompt_source(PROMPTS, Data(), 3), Stream)
    plain = PromptStream(PROMPTS, 4, 3, True)
    assert numbers(source().next(25)) == numbers(plain.next(25))
    assert len(source().next()) == 4


@pytest.mark.parametrize("alike", [1, 2, 12])
def test_a_prompt_is_drawn_with_its_chance(alike):
    """Of some 1,000 turns; four standard deviations of the count."""
    curriculum = source(chance=0.6, shuffle=False)
    for _ in range(alike):
        curriculum.note(PROMPTS[4], has_signal=False)
    drawn = numbers(curriculum.next(9 * 1000))
    chance = max(0.6**alike, LEAST)
    turns = drawn.count(0)
    assert abs(turns - 1000) < 100
    assert abs(drawn.count(4) - turns * chance) < 4 * np.sqrt(turns * chance * (1 - chance))
    passed = curriculum.metrics()
    assert passed == {
        "training/curriculum/passed_prompts": pytest.approx(turns - drawn.count(4), abs=1),
        "training/curriculum/resting_prompts": 1.0,
    }
    assert curriculum.metrics()["training/curriculum/passed_prompts"] == 0.0


def test_signal_wakes_a_prompt():
    curriculum = source(chance=0.01)
    for _ in range(5):
        curriculum.note(PROMPTS[4], has_signal=False)
    curriculum.note(PROMPTS[4], has_signal=True)
    assert sorted(numbers(curriculum.next(10))) == list(range(10))
    assert curriculum.metrics()["training/curriculum/resting_prompts"] == 0.0


def test_equal_prompts_rest_each_by_itself():
    twins = [Prompt((1,), "p", {}), Prompt((1,), "p", {})]
    curriculum = source(chance=0.01, prompts=twins)
    for _ in range(3):
        curriculum.note(twins[0], has_signal=False)
    drawn = curriculum.next(200)
    assert sum(prompt is twins[1] for prompt in drawn) > 180


def test_all_resting_still_gives_prompts():
    curriculum = source(chance=0.01)
    for prompt in PROMPTS:
        curriculum.note(prompt, has_signal=False)
    assert len(curriculum.next(4)) == 4


def test_it_goes_on_where_it_was_saved():
    """Through JSON, in the middle of an epoch, with prompts that rest."""
    straight, first = source(), source()
    for curriculum in (straight, first):
        for prompt in curriculum.next(7):
            curriculum.note(prompt, has_signal=prompt.row["row"] % 3 == 0)
    saved = json.loads(json.dumps(first.state()))
    again = source()
    again.restore(saved)
    for _ in range(20):
        drawn = straight.next(5)
        assert numbers(again.next(5)) == numbers(drawn)
        for prompt in drawn:
            for curriculum in (straight, again):
                curriculum.note(prompt, has_signal=prompt.row["row"] % 2 == 0)
    assert again.state() == straight.state()


def test_it_can_begin_and_end_in_the_middle_of_a_run():
    plain, curriculum = PromptStream(PROMPTS, 4, 3, True), source()
    plain.next(7)
    curriculum.restore(plain.state())
    assert numbers(curriculum.next(5)) == numbers(plain.next(5))
    back = PromptStream(PROMPTS, 4, 3, True)
    back.restore(curriculum.state())
    assert numbers(back.next(5)) == numbers(plain.next(5))


def test_another_order_is_refused():
    with pytest.raises(ValueError, match="the saved data position belongs to other prompts"):
        source(seed=4).restore(source(seed=3).state())
