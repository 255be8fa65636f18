"""The optimizer section, which a policy and its critic have one of each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jaxrl_post.config_base import Count, Fraction, NonNegative, Section


class Optimizer(Section):
    """AdamW with global-norm clipping."""

    learning_rate: NonNegative = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: stay, or fall to `final_fraction` of the peak over the run's steps."""
    warmup_steps: Count = 0
    final_fraction: Fraction = 0.0
    b1: float = Field(default=0.9, ge=0.0, lt=1.0)
    b2: float = Field(default=0.999, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: NonNegative = 0.0
    offload: bool = False
    """Keep the moments in the pinned memory of each device's host between updates; they come to the device for one."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Global norm to clip to; null does not clip."""
