"""`python -m launch pairs RUN_DIR --to DIR`: a run's samples as data for preference recipes and fine-tuning."""

from __future__ import annotations

import sys
from pathlib import Path

from jaxrl_post.data.pairs import imitation_rows, preference_rows, read_questions, write_rows
from jaxrl_post.models.folders import check_free, new_folder


def pairs(run_dir: str | Path, to: str | Path, threshold: float = 1.0, per_question: int = 8) -> None:
    """Write DIR/preferences.jsonl (right against wrong answers) and DIR/right.jsonl (right answers alone).

    Raises: ValueError for a folder without samples, when no answer reached the threshold, and for a `to` in use.
    """
    to = Path(to)
    check_free(to)
    questions = read_questions(Path(run_dir) / "rollouts", threshold)
    preferences = list(preference_rows(questions, per_question))
    right = list(imitation_rows(questions, per_question))
    if not right:
        raise ValueError(
            f"none of the finished answers in {run_dir} has a reward of {threshold} or more: lower --threshold, or "
            "sample more"
        )
    with new_folder(to) as folder:
        write_rows(folder / "preferences.jsonl", preferences)
        write_rows(folder / "right.jsonl", right)
    print(
        f"{len(questions)} questions: wrote {len(preferences)} pairs and {len(right)} right answers to {to}",
        file=sys.stderr,
    )
