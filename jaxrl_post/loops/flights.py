"""Partial rollouts in the loop: groups that are under way from one rollout to the next.

A rollout holds P groups: those that an earlier one left unfinished, oldest first, and new prompts for the rest. It
stops when enough has finished (`rollout.partial`); whole groups are handed over, the others go on in the next rollout.

P groups of G samples.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_post.config import PartialRollout
from jaxrl_post.data.curriculum import PromptSource
from jaxrl_post.loops.groups import completion_from_json, completion_to_json
from jaxrl_post.loops.measures import Metrics, mean_max_min
from jaxrl_post.rollout.partial import Partial, Start
from jaxrl_post.rollout.sampler import Rollout
from jaxrl_post.types import Completion, Prompt, StopReason

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Flight:
    """A group under way: its prompt and where each of its G samples is."""

    prompt: Prompt
    starts: tuple[Start, ...]

    @property
    def completions(self) -> list[Completion]:
        """What has been sampled so far, of a group that has been in a rollout."""
        return [start.so_far for start in self.starts if start.so_far is not None]

    @property
    def whole(self) -> bool:
        return all(start.done for start in self.starts)


class Flights:
    """The groups under way; `state` holds them."""

    def __init__(self, options: PartialRollout, prompts: int, group: int, replicas: int):
        """`prompts` groups in a rollout on so many data replicas, `group` samples each."""
        self._options, self._prompts, self._group, self._replicas = options, prompts, group, replicas
        self._waiting: list[Flight] = []
        self._aboard: list[Flight] = []

    def board(self, stream: PromptSource, seed: int, step: int) -> tuple[list[Prompt], Partial]:
        """The groups of the next rollout. `seed` and `step` key the draws of new ones, with their place in it.

        Those under way are dealt evenly to the replicas, as these do not wait for each other.
        """
        old, self._waiting = self._waiting[: self._prompts], self._waiting[self._prompts :]
        places = dealt(self._prompts, self._replicas)
        at = dict(zip(places, old, strict=False))
        free = sorted(places[len(old) :])
        for place, prompt in zip(free, stream.next(len(free)), strict=True):
            requests = range(place * self._group, (place + 1) * self._group)
            at[place] = Flight(prompt, tuple(Start(seed, step, request) for request in requests))
        self._aboard = [at[place] for place in range(self._prompts)]
        starts = [
            dataclasses.replace(start, urgent=step - start.step >= self._options.max_age)
            for flight in self._aboard
            for start in flight.starts
        ]
        return [flight.prompt for flight in self._aboard], Partial(
            self._options.finish_fraction, self._options.of, starts
        )

    def land(self, rollout: Rollout) -> tuple[list[Prompt], Rollout]:
        """The groups that are whole after the rollout, with all that was ever sampled of them; the others wait."""
        completions = iter(rollout.completions)
        after = [
            Flight(f.prompt, tuple(dataclasses.replace(start, so_far=next(completions)) for start in f.starts))
            for f in self._aboard
        ]
        landed = [flight for flight in after if flight.whole]
        waiting = [*self._waiting, *(flight for flight in after if not flight.whole)]
        self._waiting = sorted(waiting, key=lambda flight: flight.starts[0].step)
        numbered = [dataclasses.replace(c, prompt=i) for i, flight in enumerate(landed) for c in flight.completions]
        return [flight.prompt for flight in landed], dataclasses.replace(rollout, completions=numbered)

    @property
    def waiting(self) -> list[Flight]:
        """Groups that go on in the next rollout, oldest first."""
        return self._waiting

    def state(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """For JSON; prompts by their number."""
        return [
            {"prompt": prompts.index(flight.prompt), "starts": [_start_to_json(start) for start in flight.starts]}
            for flight in self._waiting
        ]

    def restore(self, saved: Sequence[dict[str, Any]], prompts: Sequence[Prompt], limit: int) -> None:
        """Groups of another size, or with samples beyond the `limit` of tokens, are dropped with a warning."""
        flights = [Flight(prompts[f["prompt"]], tuple(map(_start_from_json, f["starts"]))) for f in saved]
        self._waiting = [
            flight
            for flight in flights
            if len(flight.starts) == self._group and all(len(c.ids) < limit or _ended(c) for c in flight.completions)
        ]
        if len(self._waiting) < len(flights):
            log.warning("dropping %d groups under way: the config changed", len(flights) - len(self._waiting))

    def metrics(self, trained: Sequence[Completion], step: int) -> Metrics:
        """verl's ages of what is trained on in this step, and what goes on in the next."""
        lengths = [len(c.ids) for flight in self._waiting for c in flight.completions if not _ended(c)]
        return age_metrics(trained, step) | {
            "training/partial/carried_samples": float(len(lengths)),
            "training/partial/carried_tokens": float(sum(lengths)),
            "training/partial/complete_groups": float(len(trained) // self._group),
        }


def age_metrics(completions: Sequence[Completion], step: int) -> Metrics:
    """Policy versions of each trajectory: how many from its oldest to its newest token, and how far behind `step`'s its
    newest (`trajectory_staleness`) and oldest (`trajectory_staleness_worst`) are; those of several are `partial`."""
    versions = [c.versions for c in completions if c.versions is not None and len(c.versions)]
    if not versions:
        return {}
    oldest_N, newest_N = (np.array([f(v) for v in versions]) for f in (np.min, np.max))
    span_N = newest_N - oldest_N
    ages = {
        "trajectory_spans": span_N + 1,
        "trajectory_staleness": step - newest_N,
        "trajectory_staleness_worst": step - oldest_N,
    }
    spread = {name: mean_max_min(x) for name, x in ages.items()}
    return {f"training/off_policy/{name}/{kind}": x for name, found in spread.items() for kind, x in found.items()} | {
        "fully_async/partial/total_partial_num": float((span_N > 0).sum()),
        "fully_async/partial/partial_ratio": float((span_N > 0).mean()),
        "fully_async/partial/max_partial_span": float(span_N.max()),
    }


def dealt(places: int, replicas: int) -> list[int]:
    """0 … places-1, which replicas hold in runs of equal length, in the order of dealing one to each in turn."""
    each = -(-places // replicas)
    return sorted(range(places), key=lambda place: (place % each, place))


def _ended(completion: Completion) -> bool:
    return completion.stop is not StopReason.UNFINISHED


def _start_to_json(start: Start) -> dict[str, Any]:
    so_far = None if start.so_far is None else completion_to_json(start.so_far)
    return {"seed": start.seed, "step": start.step, "request": start.request, "so_far": so_far}


def _start_from_json(saved: dict[str, Any]) -> Start:
    so_far = None if saved["so_far"] is None else completion_from_json(saved["so_far"])
    return Start(saved["seed"], saved["step"], saved["request"], so_far)
