"""What a run raises the alarm about."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from jaxrl_post.config_base import Positive, Section


class Alerts(Section):
    """A line on the terminal and a metric `alert/NAME` for a number that jumps, is beyond a limit or is not finite, and
    for a reward that failed on all samples of a step."""

    jumps: dict[str, Positive] = Field(
        default={"critic/rewards/mean": 10.0, "actor/ppo_kl": 20.0, "actor/kl_loss": 20.0, "actor/grad_norm": 20.0}
    )
    """By metric: a change from one step to the next that is so many times the usual one, the median of `window`."""
    limits: dict[str, Positive] = Field(default={})
    """By metric: the largest magnitude that is no alarm, as in {actor/ppo_kl: 0.2}."""
    failed_reward_steps: PositiveInt | None = None
    """Steps in a row with a reward that timed out or crashed on all samples (`reward/all_failed`), until the run ends;
    null: never. One that raises on all of them ends it at once."""
    window: PositiveInt = 20
    """Steps that tell what is usual; no jump is told of before half of them have been seen."""
