"""A step's samples on the way to their graders while others are still sampled. G samples of each prompt."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_post.loops.decoding import text_of
from jaxrl_post.loops.job import Job
from jaxrl_post.rollout.parts import Finished
from jaxrl_post.types import Prompt, Response
from sharding.processes import share


class Early:
    """What of a rollout is known to its graders already: `responses` by the number of their request.

    Of several processes each begins with what lies on its own devices and would be its share to grade later.
    """

    def __init__(self, job: Job, prompts: Sequence[Prompt]) -> None:
        self._job, self._prompts = job, prompts
        self._mine = range(*share(len(prompts)).indices(len(prompts)))
        self._before = job.reward.early_seconds()
        self.responses: dict[int, Response] = {}

    def hear(self, news: Sequence[Finished]) -> None:
        """As `Sampler.generate` tells it."""
        G, whole = self._job.config.rollout.samples_per_prompt, self._job.config.rollout.include_stop_str_in_output
        for one in news:
            if one.request // G in self._mine:
                text = text_of(one, self._job.tokenizer, whole)
                self.responses[one.request] = Response(self._prompts[one.request // G], text, one.ids)
        self._job.reward.begin([[self.responses.get(p * G + i) for i in range(G)] for p in self._mine])

    def seconds(self) -> float:
        """How long graders have been grading since the rollout began."""
        return self._job.reward.early_seconds() - self._before
