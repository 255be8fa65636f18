"""A curriculum by what prompts have taught: those whose samples were rewarded alike are passed over for a while.

A group of equal rewards has no advantage to learn from, and what gave one in an epoch mostly does so in the next: it is
known before it is sampled (after GRESO, arXiv:2506.02177; here with one chance for too easy and too hard).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.config import CurriculumOptions, Data
from jaxrl_post.data.prompts import PromptStream
from jaxrl_post.types import Prompt

LEAST = 1 / 64  # chance of a prompt, however often it taught nothing: what is learned since may have changed that


class Curriculum:
    """A stream without the prompts that rest; in place of `PromptStream`.

    A prompt whose last n groups had no signal is handed out with a chance of `chance`**n, at least `LEAST`, when its
    turn comes. One group with signal makes n 0 again. Chances are drawn by (seed, number of the turn), so that a run
    that goes on draws as one that was never stopped.
    """

    def __init__(self, stream: PromptStream, prompts: Sequence[Prompt], options: CurriculumOptions, seed: int):
        """`prompts` are those of the stream."""
        self._stream, self._options, self._seed = stream, options, seed
        self._number = {id(prompt): i for i, prompt in enumerate(prompts)}
        self._alike: dict[int, int] = {}
        self._turns = self._passed = 0

    def next(self, count: int | None = None) -> list[Prompt]:
        """As `PromptStream.next`."""
        given: list[Prompt] = []
        while len(given) < (self._stream.batch if count is None else count):
            (prompt,) = self._stream.next(1)
            given += [prompt] if self._is_due(prompt) else []
        return given

    def note(self, prompt: Prompt, has_signal: bool) -> None:
        """What a graded group of the prompt showed."""
        number = self._number[id(prompt)]
        alike = self._alike.pop(number, 0)
        if not has_signal:
            self._alike[number] = alike + 1

    def metrics(self) -> dict[str, float]:
        """Prompts passed over since this was last asked, and those that may be."""
        passed, self._passed = self._passed, 0
        return {
            "training/curriculum/passed_prompts": float(passed),
            "training/curriculum/resting_prompts": float(len(self._alike)),
        }

    def state(self) -> dict[str, Any]:
        """The stream's, and what its prompts have shown, for JSON."""
        alike = {str(number): count for number, count in self._alike.items()}
        return self._stream.state() | {"curriculum": {"turns": self._turns, "alike": alike}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Of a run that had no curriculum, prompts have shown nothing. Raises: ValueError as `PromptStream.restore`."""
        self._stream.restore(dict(state))
        saved = state.get("curriculum", {"turns": 0, "alike": {}})
        self._turns = saved["turns"]
        self._alike = {int(number): count for number, count in saved["alike"].items()}

    def _is_due(self, prompt: Prompt) -> bool:
        turn, self._turns = self._turns, self._turns + 1
        alike = self._alike.get(self._number[id(prompt)], 0)
        due = not alike or _uniform(self._seed, turn) < max(self._options.chance**alike, LEAST)
        self._passed += not due
        return due


def _uniform(seed: int, turn: int) -> float:
    return float(np.random.default_rng((seed, turn)).random())


PromptSource = PromptStream | Curriculum


def prompt_source(prompts: Sequence[Prompt], data: Data, seed: int) -> PromptSource:
    """A run's prompts, in the order that it draws them."""
    stream = PromptStream(prompts, data.prompts_per_step, seed, data.shuffle)
    return Curriculum(stream, prompts, data.curriculum, seed) if data.curriculum else stream
