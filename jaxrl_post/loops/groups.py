"""Graded groups of samples: as one step's `Samples`, one by one, and as JSON in the host state of a checkpoint.

P groups of G samples, N = P·G; K heads of a weighted reward, else 1. Whole groups, G samples for each prompt, in prompt
order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_post.rewards.reward import Scores
from jaxrl_post.rollout.sampler import Rollout
from jaxrl_post.types import Completion, Prompt, StopReason

COLUMNS = {  # of a completion, one entry a token
    "ids": np.int32,
    "logp": np.float32,
    "raw_logp": np.float32,
    "top_ids": np.int32,
    "top_logp": np.float32,
    "versions": np.int32,
    "choices": np.uint16,
}


@dataclasses.dataclass(frozen=True)
class Samples:
    """Graded groups: `texts` [N] and `scores` follow `rollout.completions`.

    `has_signal_P` False marks a group that only fills the step up and is not trained on.
    """

    prompts: list[Prompt]
    rollout: Rollout
    texts: list[str]
    scores: Scores
    has_signal_P: np.ndarray

    @property
    def rewards_N(self) -> np.ndarray:
        """float64, the totals; NaN in groups with unfinished samples, which fill a step of partial rollouts up."""
        return self.scores.total_N

    @property
    def graded_N(self) -> np.ndarray:
        """bool: all but the samples of unfinished groups."""
        return ~np.isnan(self.scores.total_N)

    def graded(self) -> Samples:
        """The groups that are, numbered anew: what metrics and dumps tell of."""
        graded_P = np.all(self.graded_N.reshape(len(self.prompts), -1), axis=1)
        if graded_P.all():
            return self
        groups = self.groups()
        kept = np.flatnonzero(graded_P)
        return assembled([groups[i] for i in kept], self.has_signal_P[kept], [self.rollout])

    def groups(self) -> list[Group]:
        G = len(self.texts) // max(len(self.prompts), 1)
        parts = [slice(i * G, (i + 1) * G) for i in range(len(self.prompts))]
        return [
            Group(prompt, self.rollout.completions[part], self.texts[part], Scores(*(x[part] for x in self.scores)))
            for prompt, part in zip(self.prompts, parts, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Group:
    """One prompt's completions, [G] each."""

    prompt: Prompt
    completions: list[Completion]
    texts: list[str]
    scores: Scores

    def has_signal(self, weights: Sequence[float], by_heads: bool) -> bool:
        """Whether totals differ; `by_heads` whether the scores of any head with a weight do, missing ones aside."""
        if not by_heads:
            return bool(np.ptp(self.scores.total_N) > 0)
        counted_GK = self.scores.heads_NK[:, np.array(weights) != 0]
        return any(np.ptp(head[~np.isnan(head)]) > 0 for head in counted_GK.T if not np.isnan(head).all())


def ungraded(prompt: Prompt, completions: Sequence[Completion], heads: int) -> Group:
    """A group that has samples unfinished."""
    G = len(completions)
    return Group(prompt, list(completions), [""] * G, Scores(np.full(G, np.nan), np.full((G, heads), np.nan)))


def assembled(groups: Sequence[Group], has_signal_P: np.ndarray, draws: Sequence[Rollout]) -> Samples:
    """A step of groups, numbered anew; what each replica did in all draws is added up."""
    completions = [dataclasses.replace(c, prompt=i) for i, group in enumerate(groups) for c in group.completions]
    steps = tuple(np.sum([draw.decode_steps for draw in draws], axis=0).tolist())
    refills = tuple(np.sum([draw.refills for draw in draws], axis=0).tolist())
    return Samples(
        [group.prompt for group in groups],
        Rollout(completions, steps, refills),
        [text for group in groups for text in group.texts],
        Scores(*(np.concatenate(parts) for parts in zip(*(group.scores for group in groups), strict=True))),
        has_signal_P,
    )


def group_to_json(group: Group, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The prompt by its number, a missing score as null."""
    return {
        "prompt": prompts.index(group.prompt),
        "texts": group.texts,
        "rewards": group.scores.total_N.tolist(),
        "heads": [[None if np.isnan(x) else x for x in row] for row in group.scores.heads_NK.tolist()],
        "completions": [completion_to_json(c) for c in group.completions],
    }


def group_from_json(saved: dict[str, Any], prompts: Sequence[Prompt]) -> Group:
    completions = [completion_from_json(c) for c in saved["completions"]]
    scores = Scores(np.array(saved["rewards"], np.float64), np.array(saved["heads"], np.float64))
    return Group(prompts[saved["prompt"]], completions, saved["texts"], scores)


def completion_to_json(c: Completion) -> dict[str, Any]:
    """A float32 survives JSON exactly."""
    columns = {name: getattr(c, name) for name in COLUMNS}
    return {name: x.tolist() for name, x in columns.items() if x is not None} | {"stop": c.stop.name}


def completion_from_json(saved: dict[str, Any]) -> Completion:
    columns: dict[str, Any] = {name: np.array(saved[name], dtype) for name, dtype in COLUMNS.items() if name in saved}
    return Completion(prompt=0, stop=StopReason[saved["stop"]], **columns)
