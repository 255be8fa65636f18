"""The scorers that come with reasoning-gym's datasets."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from jaxrl_post.data.gym import import_reasoning_gym

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def extract_answer(completion: str) -> str:
    """The text of the last complete <answer>…</answer>, or else the whole completion; white space around it is cut.

    Without this, many scorers give partial credit to any text in which the right answer occurs.
    """
    found = _ANSWER.findall(completion)
    return (found[-1] if found else completion).strip()


def gym_score(completion: str, row: dict[str, Any], threshold: float | None) -> float:
    """The dataset's own score in [0, 1] of the extracted answer; 1.0 or 0.0 by `threshold` unless that is None.

    A few scorers raise on text they cannot parse; such an answer scores 0.
    """
    try:
        score = float(_score(extract_answer(completion), row))
    except Exception:  # whatever a scorer's parser raises on a model's text
        score = 0.0
    return score if threshold is None else float(score >= threshold)


def gym_scores(
    prompts: list[str], completions: list[str], rows: list[dict[str, Any]], threshold: float | None
) -> list[float]:
    """`gym_score` of each, as a reward function."""
    return [gym_score(text, row, threshold) for text, row in zip(completions, rows, strict=True)]


def check_gym_row(row: dict[str, Any]) -> None:
    """Raises ValueError unless the row is one of a reasoning_gym task and its scorer takes the row's own answer."""
    if missing := {"prompt", "answer", "metadata", "dataset", "options"} - set(row):
        raise ValueError(
            f"has no {', '.join(sorted(missing))}: reward.kind=reasoning_gym needs data.task.kind=reasoning_gym"
        )
    if row["answer"] is not None:
        _score(row["answer"], row)


def _score(answer: str, row: dict[str, Any]) -> float:
    entry = {"question": row["prompt"], "answer": row["answer"], "metadata": row["metadata"]}
    return _scorer(row["dataset"], json.dumps(row["options"]))(answer, entry)


@functools.cache
def _scorer(dataset: str, options: str) -> Callable[[str, dict[str, Any]], float]:
    """Some scorers depend on the dataset's options, so it is made again with them."""
    return import_reasoning_gym().create_dataset(dataset, seed=0, size=1, **json.loads(options)).score_answer
