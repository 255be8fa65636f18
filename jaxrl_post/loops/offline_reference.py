"""The reference's log-probs of a run's examples, scored once and kept in the run folder."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_post.loops.offline_job import OfflineJob
from jaxrl_post.loops.offline_learner import OfflineLearner
from jaxrl_post.models.decoder import Params
from jaxrl_post.types_offline import Example
from sharding.processes import exchange, from_first, is_first

FILE = "reference.safetensors"
SECONDS_BETWEEN_NOTES = 10
log = logging.getLogger(__name__)


def reference_scores(
    job: OfflineJob, learner: OfflineLearner, reference: Callable[[], Params]
) -> dict[Example, np.ndarray]:
    """Log-probs under `reference()` of the targets of all examples, float32: those of the run folder if they fit."""
    run_dir, key, examples = Path(job.config.run_dir), from_first(lambda: reference_key(job)), scored_examples(job)
    scores = read_scores(run_dir, key, examples)
    if not all(exchange(scores is not None)):
        scores = _score_all(learner, reference(), examples, job.config.data.examples_per_step)
        if is_first():
            write_scores(run_dir, key, scores)
    return dict(zip(examples, scores or [], strict=True))


def _score_all(learner: OfflineLearner, params: Params, examples: Sequence[Example], at_once: int) -> list[np.ndarray]:
    scores: list[np.ndarray] = []
    shown = time.monotonic()
    for start in range(0, len(examples), at_once):
        scores += learner.score(params, examples[start : start + at_once])
        if len(scores) == len(examples) or time.monotonic() - shown > SECONDS_BETWEEN_NOTES:
            print(f"reference: {len(scores)}/{len(examples)} examples scored", flush=True)
            shown = time.monotonic()
    return scores


def scored_examples(job: OfflineJob) -> list[Example]:
    """Each example a run learns from or evaluates on, once."""
    return list(dict.fromkeys((*job.examples, *job.held_out)))


def reference_key(job: OfflineJob) -> str:
    """What the scores depend on, as one hash: weights (or the seed they are drawn by), model, dtypes and all tokens."""
    model = dataclasses.replace(job.network.model, remat="none")  # which changes no score
    digest = hashlib.sha256(repr((model, job.config.seed)).encode())
    files = sorted(job.network.folder.glob("*.safetensors")) if job.network.folder is not None else []
    for path in files:
        digest.update(repr((path.name, path.stat().st_size)).encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    for example in scored_examples(job):
        digest.update(repr((example.prompt_ids, example.answers)).encode())
    return digest.hexdigest()


def read_scores(run_dir: Path, key: str, examples: Sequence[Example]) -> list[np.ndarray] | None:
    """The scores kept under this key, float32 [targets] for each example; None, with a warning, for a file that is not
    theirs or is damaged."""
    path = run_dir / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            kept, scores = file.metadata() or {}, file.get_tensor("ref_logp")
    except (SafetensorError, OSError) as error:
        log.warning("%s cannot be read (%s): scoring the examples anew", path, error)
        return None
    ends = np.cumsum([example.targets for example in examples])
    if kept.get("key") != key or kept.get("sha256") != _sha256(scores) or scores.shape != (ends[-1],):
        why = "is damaged" if kept.get("key") == key else "is of another model, seed, dtype or data"
        log.warning("%s %s: scoring the examples anew", path, why)
        return None
    return np.split(scores, ends[:-1])


def write_scores(run_dir: Path, key: str, scores: Sequence[np.ndarray]) -> None:
    """Keep them under `key`, in a file that appears whole."""
    joined, part = np.concatenate(scores), run_dir / (FILE + ".part")
    save_file({"ref_logp": joined}, part, metadata={"key": key, "sha256": _sha256(joined)})
    os.replace(part, run_dir / FILE)


def _sha256(scores: np.ndarray) -> str:
    return hashlib.sha256(scores.tobytes()).hexdigest()
