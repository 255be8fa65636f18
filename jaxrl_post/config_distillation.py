"""Distillation by the loss: a divergence between the teacher's and the student's next-token distributions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from jaxrl_post.config_algorithms import PolicyMethod
from jaxrl_post.config_base import Section
from jaxrl_post.config_teachers import Taught


class Divergence(Section):
    """What is measured at each position, over the whole vocabulary or the teacher's likeliest tokens."""

    divergence: Literal["forward_kl", "reverse_kl", "js"] = "reverse_kl"
    """KL(teacher ‖ student), KL(student ‖ teacher), or GKD's generalised Jensen–Shannon (arXiv:2306.13649)."""
    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The teacher's share of js's mixture; null is 0.5."""
    top_k: PositiveInt | None = None
    """Look at the teacher's k likeliest tokens alone (verl's forward_kl_topk uses 32); null takes the vocabulary."""
    tail: bool = True
    """With top_k, all other tokens count as one: the sum is a divergence, a lower bound of the whole one.

    False sums over the k alone, as verl does, which may be negative and draws the student's mass to them.
    """

    @model_validator(mode="after")
    def _options_are_read(self) -> Divergence:
        if self.beta is not None and self.divergence != "js":
            raise ValueError(
                f"beta={self.beta} is only read by divergence=js, not by {self.divergence}: set it to null"
            )
        if not self.tail and (self.top_k is None or self.divergence != "forward_kl"):
            raise ValueError(
                f"tail=false leaves out what lies beyond top_k={self.top_k} of divergence={self.divergence}: it needs "
                "a top_k, and divergence=forward_kl, since the others would have no lower end"
            )
        return self


class Distillation(PolicyMethod, Divergence, Taught):
    """On-policy distillation by the loss (GKD, arXiv:2306.13649): the student samples, a teacher's distributions teach.

    Rewards are measured and teach nothing.
    """

    weighs_by_ratio: ClassVar[bool] = False
    learns_from_zero_advantage: ClassVar[bool] = True
    kind: Literal["distillation"]

    @model_validator(mode="after")
    def _options_of_rewards(self) -> Distillation:
        unread = [name for name in ("overlong", "filter_groups", "correction", "off_policy_mask", "distillation")
                  if getattr(self, name) is not None]  # fmt: skip
        unread += ["kl.where=reward"] * self.kl_in_reward
        if unread:
            raise ValueError(
                f"algorithm.{unread[0]} acts on rewards, advantages or their ratio, and kind distillation learns from "
                "none of them: leave it out, or take a policy method with a section algorithm.distillation"
            )
        return self

    @property
    def taught(self) -> Taught:
        return self
