"""A step's samples: prompts from the stream, completions, rewards; and dynamic sampling, which refills a step.

P prompts a step, G samples each, N = P·G; K heads of a weighted reward, else 1. Records hold whole groups, G samples
for each prompt, in prompt order.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_post.config_algorithms import FilterGroups
from jaxrl_post.data.prompts import PromptStream
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.measures import Metrics
from jaxrl_post.models.decoder import Params
from jaxrl_post.observe.progress import Phases
from jaxrl_post.rewards.reward import Scores
from jaxrl_post.rollout.sampler import Rollout, SampleOptions, Sampler
from jaxrl_post.types import Completion, Prompt, Response, StopReason

log = logging.getLogger(__name__)

SEED_STRIDE = 0x9E3779B9  # golden ratio of 2**32: seeds of a step's further attempts lie far apart


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
        """float64, the totals."""
        return self.scores.total_N


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


class Gather:
    """Draws a step's samples. Without `filter_groups` that is one batch of prompts and all of their groups.

    With it (DAPO, arXiv:2503.14476) groups whose rewards are all equal (for a method that compares the heads of a
    weighted reward, those of every head) are dropped and further batches sampled, up to `max_attempts` more, until the
    step has its P groups. Groups beyond P open the next step, with the log-probs they were sampled with; `state` holds
    them. When attempts run out the newest dropped groups fill the step, so that its size never changes; they are marked
    and have no weight.
    """

    def __init__(self, job: Job, sampler: Sampler, stream: PromptStream):
        self._job, self._sampler, self._stream = job, sampler, stream
        self._filter: FilterGroups | None = job.config.algorithm.filter_groups
        self._carried: list[Group] = []

    def next(self, params: Params, step: int, phases: Phases) -> tuple[Samples, Metrics]:
        """The samples of `step`, drawn from `params` (rollout layout), and `training/filter_groups/*`."""
        draws = [self._draw(params, step, 0, phases)]
        if self._filter is None:
            return draws[0], {}
        kept, dropped = self._sorted(self._carried, [], draws[0])
        wanted = len(draws[0].prompts)
        while len(kept) < wanted and len(draws) <= self._filter.max_attempts:
            draws.append(self._draw(params, step, len(draws), phases))
            kept, dropped = self._sorted(kept, dropped, draws[-1])
        trained, self._carried = kept[:wanted], kept[wanted:]
        fill = dropped[len(dropped) - (wanted - len(trained)) :]
        samples = _assembled(trained, fill, [draw.rollout for draw in draws])
        return samples, self._metrics(draws=len(draws), evicted=len(dropped), filling=len(fill))

    def state(self) -> dict[str, Any]:
        """Position in the prompts and the groups carried over, for JSON."""
        prompts = self._job.train_prompts
        return {"data": self._stream.state(), "carried": [_to_json(group, prompts) for group in self._carried]}

    def restore(self, state: dict[str, Any]) -> None:
        """Carried groups that the config has no place for any more are dropped with a warning.

        Raises: ValueError as `PromptStream.restore`.
        """
        self._stream.restore(state["data"])
        saved = [_from_json(group, self._job.train_prompts) for group in state.get("carried", [])]
        size = self._job.config.rollout.samples_per_prompt if self._filter else 0
        shape = (size, len(self._job.reward.weights))
        self._carried = [group for group in saved if group.scores.heads_NK.shape == shape]
        if len(self._carried) < len(saved):
            log.warning("dropping %d carried groups: the config changed", len(saved) - len(self._carried))

    def _draw(self, params: Params, step: int, attempt: int, phases: Phases) -> Samples:
        prompts = self._stream.next()
        with phases("gen"):
            rollout = sample(self._job, self._sampler, params, prompts, step, attempt)
        with phases("reward"):
            texts, scores = grade(self._job, prompts, rollout)
        return Samples(prompts, rollout, texts, scores, np.ones(len(prompts), bool))

    def _sorted(self, kept: list[Group], dropped: list[Group], drawn: Samples) -> tuple[list[Group], list[Group]]:
        """Both lists with the drawn groups at the end of the one they belong to."""
        weights, by_heads = self._job.reward.weights, self._job.config.algorithm.compares_heads
        useful = [(group, group.has_signal(weights, by_heads)) for group in _groups(drawn)]
        return [*kept, *(g for g, yes in useful if yes)], [*dropped, *(g for g, yes in useful if not yes)]

    def _metrics(self, draws: int, evicted: int, filling: int) -> Metrics:
        """Counts of samples, but for the batches drawn."""
        G = self._job.config.rollout.samples_per_prompt
        return {
            "training/filter_groups/batches": float(draws),
            "training/filter_groups/evicted_samples": float(evicted * G),
            "training/filter_groups/missing_samples": float(filling * G),
            "training/filter_groups/carried_samples": float(len(self._carried) * G),
        }


def sample(
    job: Job, sampler: Sampler, params: Params, prompts: Sequence[Prompt], step: int, attempt: int = 0
) -> Rollout:
    """G completions of every prompt, drawn with the noise of this step and attempt."""
    options = job.config.rollout
    asked = SampleOptions(
        samples_per_prompt=options.samples_per_prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        slots=options.slots,
        refill=options.refill,
        prefill_columns=options.prefill_columns,
        lockstep=options.lockstep,
    )
    ids = [prompt.ids for prompt in prompts]
    seed = (job.config.seed + attempt * SEED_STRIDE) % 2**32
    return sampler.generate(params, ids, asked, seed=seed, step=step, width=job.prompt_width)


def sample_greedily(job: Job, sampler: Sampler, params: Params, prompts: Sequence[Prompt]) -> Rollout:
    """The likeliest token, again and again: one completion of every prompt."""
    options = job.config.rollout
    greedy = SampleOptions(
        max_new_tokens=options.max_new_tokens,
        temperature=0.0,
        prefill_columns=options.prefill_columns,
        lockstep=options.lockstep,
    )
    ids = [prompt.ids for prompt in prompts]
    return sampler.generate(params, ids, greedy, seed=job.config.seed, step=0, width=job.prompt_width)


def grade(job: Job, prompts: Sequence[Prompt], rollout: Rollout) -> tuple[list[str], Scores]:
    """The completions as text, and their scores."""
    responses = [Response(prompts[c.prompt], job.tokenizer.decode(c.ids), c.ids) for c in rollout.completions]
    return [response.text for response in responses], job.reward(responses)


def _groups(samples: Samples) -> list[Group]:
    G = len(samples.texts) // len(samples.prompts)
    parts = [slice(i * G, (i + 1) * G) for i in range(len(samples.prompts))]
    completions, texts, scores = samples.rollout.completions, samples.texts, samples.scores
    return [
        Group(prompt, completions[part], texts[part], Scores(*(x[part] for x in scores)))
        for prompt, part in zip(samples.prompts, parts, strict=True)
    ]


def _assembled(trained: list[Group], fill: list[Group], draws: Sequence[Rollout]) -> Samples:
    """A step of groups, numbered anew; what each replica did in all draws is added up."""
    groups = [*trained, *fill]
    completions = [dataclasses.replace(c, prompt=i) for i, group in enumerate(groups) for c in group.completions]
    steps = tuple(np.sum([draw.decode_steps for draw in draws], axis=0).tolist())
    refills = tuple(np.sum([draw.refills for draw in draws], axis=0).tolist())
    return Samples(
        [group.prompt for group in groups],
        Rollout(completions, steps, refills),
        [text for group in groups for text in group.texts],
        Scores(*(np.concatenate(parts) for parts in zip(*(group.scores for group in groups), strict=True))),
        np.arange(len(groups)) < len(trained),
    )


def _to_json(group: Group, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The prompt by its number, a missing score as null; a float32 survives JSON exactly."""
    return {
        "prompt": prompts.index(group.prompt),
        "texts": group.texts,
        "rewards": group.scores.total_N.tolist(),
        "heads": [[None if np.isnan(x) else x for x in row] for row in group.scores.heads_NK.tolist()],
        "completions": [
            {"ids": c.ids.tolist(), "logp": c.logp.tolist(), "raw_logp": c.raw_logp.tolist(), "stop": c.stop.name}
            for c in group.completions
        ],
    }


def _from_json(saved: dict[str, Any], prompts: Sequence[Prompt]) -> Group:
    completions = [
        Completion(
            0,
            np.array(c["ids"], np.int32),
            np.array(c["logp"], np.float32),
            np.array(c["raw_logp"], np.float32),
            StopReason[c["stop"]],
        )
        for c in saved["completions"]
    ]
    scores = Scores(np.array(saved["rewards"], np.float64), np.array(saved["heads"], np.float64))
    return Group(prompts[saved["prompt"]], completions, saved["texts"], scores)
