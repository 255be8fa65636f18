"""A step's samples: prompts from the stream, completions, rewards; and dynamic sampling, which refills a step.

P prompts a step, G samples each, N = P·G.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.config_algorithms import FilterGroups
from jaxrl_post.data.curriculum import Curriculum, PromptSource
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.loops.decoding import decoding, greedy_decoding, text_of
from jaxrl_post.loops.early import Early
from jaxrl_post.loops.flights import Flights
from jaxrl_post.loops.groups import Group, Samples, assembled, group_from_json, group_to_json, ungraded
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.measures import Metrics
from jaxrl_post.models.decoder import Params
from jaxrl_post.observe.progress import Phases
from jaxrl_post.rewards.reward import Scores
from jaxrl_post.rollout.partial import Partial
from jaxrl_post.rollout.parts import Finished
from jaxrl_post.rollout.sampler import Rollout, SampleOptions, Sampler
from jaxrl_post.types import Prompt, Response
from sharding.mesh import batch_shards
from sharding.processes import split_work

log = logging.getLogger(__name__)

NOTHING_BEGUN: Mapping[int, Response] = MappingProxyType({})
SEED_STRIDE = 0x9E3779B9  # golden ratio of 2**32: seeds of a step's further attempts lie far apart


class Gather:
    """Draws a step's samples: one batch of prompts and all of their groups, or what is wanted of these.

    With `filter_groups` (DAPO, arXiv:2503.14476) groups whose rewards are all equal (for a method that compares the
    heads of a weighted reward, those of every head) are dropped and further batches sampled, up to `max_attempts` more,
    until the step has its P groups. Groups beyond P open the next step, with the log-probs they were sampled with. When
    attempts run out the newest dropped groups fill the step, so that its size never changes; they are marked and have
    no weight.

    With partial rollouts a batch is the groups that are whole after it, those under way before it among them. The
    others fill a step that would be short; they have no rewards either. `state` holds all that is carried.
    """

    def __init__(self, job: Job, sampler: Sampler, stream: PromptSource):
        self._job, self._sampler, self._stream = job, sampler, stream
        self._curriculum = stream if isinstance(stream, Curriculum) else None
        self._filter: FilterGroups | None = job.config.algorithm.filter_groups
        self._carried: list[Group] = []
        rollout, data = job.config.rollout, job.config.data
        replicas = batch_shards(job.network.mesh)
        self._flights = (
            Flights(rollout.partial, data.prompts_per_step, rollout.samples_per_prompt, replicas)
            if rollout.partial
            else None
        )

    def next(self, params: Params, step: int, phases: Phases) -> tuple[Samples, Metrics]:
        """The samples of `step`, drawn from `params` (rollout layout), and `training/{filter_groups, curriculum}/*`."""
        samples, metrics = self._step(params, step, phases)
        return samples, metrics | (self._curriculum.metrics() if self._curriculum else {})

    def _step(self, params: Params, step: int, phases: Phases) -> tuple[Samples, Metrics]:
        draws = [self._draw(params, step, 0, phases)]
        if self._filter is None and self._flights is None:
            return draws[0], {}
        wanted, attempts = self._job.config.data.prompts_per_step, self._filter.max_attempts if self._filter else 0
        kept, dropped = self._sorted(self._carried, [], draws[0])
        while len(kept) < wanted and len(draws) <= attempts:
            draws.append(self._draw(params, step, len(draws), phases))
            kept, dropped = self._sorted(kept, dropped, draws[-1])
        trained, self._carried = kept[:wanted], kept[wanted:]
        fill = dropped[max(len(dropped) - (wanted - len(trained)), 0) :]
        fill += self._unfinished(wanted - len(trained) - len(fill))
        groups = [*trained, *fill]
        order = spread(len(trained), len(fill)) if self._flights else list(range(wanted))
        has_signal_P = np.array(order) < len(trained)
        samples = assembled([groups[i] for i in order], has_signal_P, [draw.rollout for draw in draws])
        return samples, self._metrics(trained, step, draws=len(draws), evicted=len(dropped), filling=len(fill))

    def state(self) -> dict[str, Any]:
        """Position in the prompts and the groups carried over, for JSON."""
        prompts = self._job.train_prompts
        carried = [group_to_json(group, prompts) for group in self._carried]
        flights = {"under_way": self._flights.state(prompts)} if self._flights else {}
        return {"data": self._stream.state(), "carried": carried} | flights

    def restore(self, state: dict[str, Any]) -> None:
        """Carried groups that the config has no place for any more are dropped with a warning.

        Raises: ValueError as `PromptStream.restore`.
        """
        self._stream.restore(state["data"])
        saved = [group_from_json(group, self._job.train_prompts) for group in state.get("carried", [])]
        size = self._job.config.rollout.samples_per_prompt if self._filter else 0
        shape = (size, len(self._job.reward.weights))
        self._carried = [group for group in saved if group.scores.heads_NK.shape == shape]
        if len(self._carried) < len(saved):
            log.warning("dropping %d carried groups: the config changed", len(saved) - len(self._carried))
        under_way = state.get("under_way", [])
        if self._flights:
            self._flights.restore(under_way, self._job.train_prompts, self._job.config.rollout.max_new_tokens)
        elif under_way:
            log.warning("dropping %d groups under way: rollout.partial is null now", len(under_way))

    def _draw(self, params: Params, step: int, attempt: int, phases: Phases) -> Samples:
        with phases("gen"):
            prompts, rollout, begun = self._rollout(params, step, attempt, phases)
        with phases("reward"):
            texts, scores = grade(self._job, prompts, rollout, begun)
        samples = Samples(prompts, rollout, texts, scores, np.ones(len(prompts), bool))
        if self._curriculum:
            for group in samples.groups():
                self._curriculum.note(group.prompt, self._has_signal(group))
        return samples

    def _rollout(
        self, params: Params, step: int, attempt: int, phases: Phases
    ) -> tuple[list[Prompt], Rollout, dict[int, Response]]:
        """Whole groups, and the responses that graders have been given on the way, by number."""
        job, sampler = self._job, self._sampler
        if self._flights:
            prompts, partial = self._flights.board(self._stream, draw_seed(job, attempt), step)
            return *self._flights.land(sample(job, sampler, params, prompts, step, attempt, partial)), {}
        prompts = self._stream.next()
        if not job.reward.early:
            return prompts, sample(job, sampler, params, prompts, step, attempt), {}
        early = Early(job, prompts)
        rollout = sample(job, sampler, params, prompts, step, attempt, hear=early.hear)
        phases.beside("reward_early", early.seconds())
        return prompts, rollout, early.responses

    def _sorted(self, kept: list[Group], dropped: list[Group], drawn: Samples) -> tuple[list[Group], list[Group]]:
        """Both lists with the drawn groups at the end of the one they belong to."""
        useful = [(group, self._filter is None or self._has_signal(group)) for group in drawn.groups()]
        return [*kept, *(g for g, yes in useful if yes)], [*dropped, *(g for g, yes in useful if not yes)]

    def _has_signal(self, group: Group) -> bool:
        return group.has_signal(self._job.reward.weights, self._job.config.algorithm.compares_heads)

    def _unfinished(self, count: int) -> list[Group]:
        waiting = self._flights.waiting[:count] if self._flights else []
        return [ungraded(flight.prompt, flight.completions, len(self._job.reward.weights)) for flight in waiting]

    def _metrics(self, trained: Sequence[Group], step: int, draws: int, evicted: int, filling: int) -> Metrics:
        """Counts of samples, but for the batches drawn; and how old they are."""
        ages = self._flights.metrics([c for group in trained for c in group.completions], step) if self._flights else {}
        if self._filter is None:
            return ages
        G = self._job.config.rollout.samples_per_prompt
        return ages | {
            "training/filter_groups/batches": float(draws),
            "training/filter_groups/evicted_samples": float(evicted * G),
            "training/filter_groups/missing_samples": float(filling * G),
            "training/filter_groups/carried_samples": float(len(self._carried) * G),
        }


def spread(trained: int, filling: int) -> list[int]:
    """0 … trained-1 evenly among the others, so that mini-batches, which are runs of groups, get equal shares."""
    share = [*((i + 0.5) / trained for i in range(trained)), *((i + 0.5) / filling for i in range(filling))]
    return sorted(range(len(share)), key=share.__getitem__)


def draw_seed(job: Job, attempt: int) -> int:
    return (job.config.seed + attempt * SEED_STRIDE) % 2**32


def sample_options(config: Config, tokenizer: Tokenizer) -> SampleOptions:
    """What a run asks of its sampler."""
    options = config.rollout
    return SampleOptions(
        samples_per_prompt=options.samples_per_prompt,
        max_new_tokens=options.max_new_tokens,
        slots=options.slots,
        refill=options.refill,
        prefill_columns=options.prefill_columns,
        lockstep=options.lockstep,
        attention=options.attention,
        routing=config.model.moe.routing_replay,
        **decoding(config, tokenizer),
    )


def sample(
    job: Job,
    sampler: Sampler,
    params: Params,
    prompts: Sequence[Prompt],
    step: int,
    attempt: int = 0,
    partial: Partial | None = None,
    hear: Callable[[Sequence[Finished]], None] | None = None,
) -> Rollout:
    """G completions of every prompt, drawn with the noise of this step and attempt, or as `partial` says; `hear` as
    `Sampler.generate`."""
    asked = sample_options(job.config, job.tokenizer)
    ids = [prompt.ids for prompt in prompts]
    seed = draw_seed(job, attempt)
    width = job.prompt_width
    return sampler.generate(params, ids, asked, seed=seed, step=step, width=width, partial=partial, hear=hear)


def sample_greedily(job: Job, sampler: Sampler, params: Params, prompts: Sequence[Prompt]) -> Rollout:
    """The likeliest token, again and again: one completion of every prompt."""
    options = job.config.rollout
    greedy = SampleOptions(
        max_new_tokens=options.max_new_tokens,
        prefill_columns=options.prefill_columns,
        lockstep=options.lockstep,
        attention=options.attention,
        **greedy_decoding(job.config, job.tokenizer),
    )
    ids = [prompt.ids for prompt in prompts]
    return sampler.generate(params, ids, greedy, seed=job.config.seed, step=0, width=job.prompt_width)


def grade(
    job: Job, prompts: Sequence[Prompt], rollout: Rollout, begun: Mapping[int, Response] = NOTHING_BEGUN
) -> tuple[list[str], Scores]:
    """The completions as text, and their scores; `begun` are the responses that graders know already, by number."""
    whole, completions = job.config.rollout.include_stop_str_in_output, rollout.completions
    read = lambda i: begun[i].text if i in begun else text_of(completions[i], job.tokenizer, whole)
    texts = split_work(range(len(completions)), lambda part: [read(i) for i in part])
    fresh = lambda i: Response(prompts[completions[i].prompt], texts[i], completions[i].ids)
    return texts, job.reward([begun.get(i) or fresh(i) for i in range(len(completions))])
