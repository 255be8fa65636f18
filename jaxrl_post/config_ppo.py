"""PPO with a critic: `algorithm.kind: ppo`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from jaxrl_post.config_algorithms import Clipped, RewardKL
from jaxrl_post.config_base import Fraction, NonNegative, Positive
from jaxrl_post.config_optimizer import Optimizer


class CriticOptions(Optimizer):
    """The critic's own optimizer and loss; its epochs, mini-batches and reduction are the policy's."""

    decoder: Literal["own", "shared"] = "own"
    """What the value head reads: a decoder of its own, which begins as a copy of the policy and learns with the head,
    or the policy's as it is at the moment, which the value loss does not move: no second model in memory.
    """
    learning_rate: NonNegative = 1e-5
    value_clip: Positive | None = 0.5
    """How far from its value at sampling time a token's value may move and still be paid for; null does not clip.

    In units of the return; slime and SkyRL use 0.2.
    """


class PPO(Clipped):
    """PPO (arXiv:1707.06347) with GAE (arXiv:1506.02438): a critic, by default a second decoder, values every token."""

    compares_samples: ClassVar[bool] = False
    kind: Literal["ppo"]
    gamma: Fraction = 1.0
    """Discount of each token to come."""
    lam: Fraction = 1.0
    """GAE's λ: 1 compares the return with the value of the state, 0 looks one token ahead."""
    bootstrap_truncated: bool = False
    """Let a response cut by the token limit go on at the critic's value of the state after its last token.

    False takes the limit for a part of the task: a reward is given for the text as it was cut, and nothing follows.
    """
    critic: CriticOptions = CriticOptions()
    kl: RewardKL = RewardKL()

    @model_validator(mode="after")
    def _bootstrap_is_read(self) -> PPO:
        if self.bootstrap_truncated and self.drop_truncated:
            raise ValueError(
                "algorithm.bootstrap_truncated=true values the end of truncated responses, which "
                "algorithm.drop_truncated=true leaves out: set one of them to false"
            )
        return self
