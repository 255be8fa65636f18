"""What a run raises the alarm about."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from jaxrl_post.config_base import Positive, Section


class Alerts(Section):
    """A line on the terminal and a metric `alert/NAME` for a number that jumps, is beyond a limit or is not finite."""

    jumps: dict[str, Positive] = Field(
        default={"critic/rewards/mean": 10.0, "actor/ppo_kl": 20.0, "actor/kl_loss": 20.0, "actor/grad_norm": 20.0}
    )
    """By metric: a change from one step to the next that is so many times the usual one, the median of `window`."""
    limits: dict[str, Positive] = Field(default={})
    """By metric: the largest magnitude that is no alarm, as in {actor/ppo_kl: 0.2}."""
    window: PositiveInt = 20
    """Steps that tell what is usual; no jump is told of before half of them have been seen."""
