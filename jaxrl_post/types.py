"""Records at stage borders. Host-side records hold numpy arrays; `TrainBatch` goes to the devices.

Legend: P prompts, G samples a prompt (group), N = P·G samples, R response limit in tokens; A micro-batches, B rows,
T token positions of a row, M target tokens of a row.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np


class StopReason(enum.IntEnum):
    """Why a completion ended. Truncation is read from here, never from a padded width."""

    STOP = 1  # a stop id was sampled, or a stop string completed; both are part of the completion
    LENGTH = 2  # the request's own token limit was reached
    UNFINISHED = 3  # the rollout stopped first; a later one goes on with the sample


@dataclasses.dataclass(frozen=True)
class Lesson:
    """Which teacher (by number) grades the answers to a prompt, and the prompt that it sees; None: the student's."""

    teacher: int = 0
    prompt_ids: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One task row ready to be sampled from.

    `ids` are the token ids the model sees, `text` what they spell, `row` the task's own fields (`answer`, …). Where the
    student has teachers, `lesson` is what one of them makes of it.
    """

    ids: tuple[int, ...]
    text: str
    row: dict[str, Any]
    lesson: Lesson = Lesson()


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled response.

    `ids` int32 [n] as sampled, the stop id or the token that completes a stop string included; `logp` float32 [n]
    log-probabilities under the distribution that was sampled from (after penalties, temperature, top-k, …); `raw_logp`
    float32 [n] under softmax(logits); `prompt` is the index of its prompt in the step. `stop_string` is the one that
    the last id completed. `top_ids` int32 and `top_logp` float32 [n, k] are the k likeliest ids of each place and their
    raw log-probabilities, where asked for. `versions` int32 [n] is the policy step in which each token was sampled, of
    rollouts that may stop early. `choices`, unsigned [prompt + n - 1, L, k], are the experts that each token but the
    last went to, in every layer, where asked for. Example: ids [7, 8, 2], logp [-0.1, -1.2, -0.3], stop STOP, prompt 0.
    """

    prompt: int
    ids: np.ndarray
    logp: np.ndarray
    raw_logp: np.ndarray
    stop: StopReason
    stop_string: str | None = None
    top_ids: np.ndarray | None = None
    top_logp: np.ndarray | None = None
    versions: np.ndarray | None = None
    choices: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Response:
    """What a reward looks at: a completion of `prompt` as text without special tokens, and as its sampled ids [n]."""

    prompt: Prompt
    text: str
    ids: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A completion with what the update needs: its prompt's ids, and an advantage.

    `advantage` is one number for the whole response or float32 [n], one for each token. Samples with the same `group`
    share `prompt_ids`. `train` False keeps it out of the loss (and its denominators). `value` and `value_target`,
    float32 [n], are for a critic: what it said of each token's state at sampling time, and what it should have said.
    `lesson` is its prompt's. `choices`, unsigned [prompt + n - 1, L, k], are the experts that the sampler sent each
    token but the last to, in every layer, where they are to be replayed.
    """

    group: int
    prompt_ids: tuple[int, ...]
    response_ids: np.ndarray
    logp: np.ndarray
    advantage: float | np.ndarray
    train: bool = True
    value: np.ndarray | None = None
    value_target: np.ndarray | None = None
    lesson: Lesson = Lesson()
    choices: np.ndarray | None = None


class TrainBatch(NamedTuple):
    """Packed rows of one optimizer update; every field has a leading micro-batch axis A.

    A row holds prompts and responses of whole sequences. A token sees earlier tokens of its own segment that belong to
    the segment's trunk (branch 0: the prompt) or to its own branch, so several responses can share one prompt.

    Per position, [A, B, T]:  tokens int32; positions int32 (from 0 in each sequence); segments int32 (0 = padding);
    branches int32 (0 = prompt, 1… = response).
    Per target token, [A, B, M], live entries first in each row:  source int32, the column whose hidden state predicts
    the target; target int32; sequence int32, the response's index inside its row; mask bool, True for tokens that were
    sampled and are trained on; weight float32, the token's share of the loss (0 where masked), so that the loss is the
    plain sum of weight · loss whatever the split into rows, micro-batches and devices; advantage, old_logp (π_old),
    ref_logp (π_ref, zeros without a reference) float32; rollout_logp float32, as recorded by the sampler.
    """

    tokens: Any
    positions: Any
    segments: Any
    branches: Any
    source: Any
    target: Any
    sequence: Any
    mask: Any
    weight: Any
    advantage: Any
    old_logp: Any
    ref_logp: Any
    rollout_logp: Any


class RoutedBatch(NamedTuple):
    """Rows of one optimizer update and the experts each of their tokens goes to, unsigned [A, B, T, L, k]."""

    rows: TrainBatch
    choices: Any


class TeacherView(NamedTuple):
    """What teachers read of packed rows. Targets lie where they do in the `TrainBatch`; prompts may be others.

    Per position, [A, B, T]: tokens, positions, segments, branches, as there. Per target, [A, B, M] int32: source, the
    column whose hidden state predicts the target; teacher, the number of the one that grades it.
    """

    tokens: Any
    positions: Any
    segments: Any
    branches: Any
    source: Any
    teacher: Any


class TaughtBatch(NamedTuple):
    """Rows of one optimizer update as the student reads them, and as its teachers do."""

    rows: TrainBatch
    view: TeacherView
