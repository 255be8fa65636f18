"""When a run saves, and which of its checkpoints stay."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from jaxrl_post.config_base import Count, Positive, Section

CLOCK = re.compile(r"(\d{1,4}):([0-5]\d):([0-5]\d)")


class KeepBest(Section):
    """A step whose metric beats all before it is saved at once, and stays until a better one is saved."""

    metric: Annotated[str, Field(min_length=1)]
    """As in metrics.jsonl: val-core/…, known after evaluations alone, or any that training has (critic/score/mean)."""
    mode: Literal["max", "min"] = "max"


class Checkpoint(Section):
    every: Count = 20
    """Steps between checkpoints; 0 saves only the last step."""
    every_minutes: Positive | None = None
    """Save too after the first step that ends so long after the last save; null looks at no clock."""
    before: Annotated[str, Field(pattern=f"^{CLOCK.pattern}$")] | PositiveInt | None = None
    """The time a run may take, as HH:MM:SS or in seconds, from the start of the process's own run: when twice its
    longest step may not fit any more it saves, ends with exit code 0, and the same command goes on from there. For
    the time limit of a batch job, less what starting takes."""
    keep_last: PositiveInt = 2
    keep_best: KeepBest | None = None
    """Besides `keep_last`, keep the step with the best value of a metric."""
    resume: bool = True
    """Continue from the newest complete checkpoint in the run folder, if there is one."""

    @property
    def limit_seconds(self) -> int | None:
        """`before` in seconds."""
        if not isinstance(self.before, str):
            return self.before
        hours, minutes, seconds = (int(part) for part in self.before.split(":"))
        return hours * 3600 + minutes * 60 + seconds

    @model_validator(mode="after")
    def _some_time(self) -> Checkpoint:
        if self.limit_seconds == 0:
            raise ValueError(f"checkpoint.before={self.before} leaves no time to run: give HH:MM:SS above 0, or null")
        return self
