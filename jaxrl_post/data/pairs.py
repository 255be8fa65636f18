"""From a run's graded samples to files an offline recipe reads: preference pairs, and right answers to imitate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jaxrl_post.data.jsonl import Row


@dataclasses.dataclass(frozen=True)
class Question:
    """One task row with the distinct answers it got, in the order they were sampled."""

    row: Row
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def read_questions(rollouts: Path, threshold: float) -> list[Question]:
    """The questions of all `rollouts/*.jsonl`, in order of appearance; an answer is right from reward `threshold` on.

    Only answers that the model ended itself are looked at: one cut by the token limit has no end to learn.
    Raises: ValueError when there are no samples, or lines of another form.
    """
    files = sorted(rollouts.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{rollouts} holds no samples: give the run_dir of an online run with dump_rollouts=true")
    found: dict[str, tuple[Row, dict[str, bool]]] = {}
    for sample in _samples(files):
        key = json.dumps(sample["row"], sort_keys=True)
        _, answers = found.setdefault(key, (sample["row"], {}))
        if sample["stop"] == "stop":
            answers.setdefault(sample["completion"], sample["reward"] >= threshold)
    return [
        Question(row, tuple(a for a, ok in answers.items() if ok), tuple(a for a, ok in answers.items() if not ok))
        for row, answers in found.values()
    ]


def preference_rows(questions: Iterable[Question], per_question: int) -> Iterator[Row]:
    """{prompt or messages, answer, chosen, rejected}: the i-th wrong answer of a question beside its i-th right one.

    Where there are fewer right ones they are used again, so that every wrong answer is seen; questions that lack
    either kind give no pair.
    """
    for question in questions:
        if question.right:
            for i, wrong in enumerate(question.wrong[:per_question]):
                yield question.row | {"chosen": question.right[i % len(question.right)], "rejected": wrong}


def imitation_rows(questions: Iterable[Question], per_question: int) -> Iterator[Row]:
    """{prompt or messages, answer, completion} for the right answers of each question (rejection sampling)."""
    for question in questions:
        for answer in question.right[:per_question]:
            yield question.row | _without_messages(question.row, answer)


def _without_messages(row: Row, answer: str) -> Row:
    if "messages" in row:
        return {"messages": [*row["messages"], {"role": "assistant", "content": answer}]}
    return {"completion": answer}


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _samples(files: Sequence[Path]) -> Iterator[Row]:
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
            if not line.strip():
                continue
            try:
                sample = json.loads(line)
                missing = [key for key in ("row", "completion", "reward", "stop") if key not in sample]
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}:{number} is no sample of a run: {error}") from None
            if missing:
                raise ValueError(f"{file}:{number} is no sample of a run: it lacks {' and '.join(missing)}")
            yield sample
