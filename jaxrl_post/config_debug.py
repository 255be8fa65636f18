"""Modes for finding faults."""

from __future__ import annotations

from jaxrl_post.config_base import Section
from jaxrl_post.config_checkpoint import Checkpoint


class OfflineDebug(Section):
    deterministic: bool = False
    """The same bits on the same devices, again and again. GPUs are asked for kernels that no clock chooses and that add
    in one order, at the price of speed; and the clock may decide nothing of a run: no save, and no reward, as grading
    that reaches `reward.timeout` ends the run."""

    def check_clock(self, checkpoint: Checkpoint) -> None:
        """Raises: ValueError where a deterministic run is to save by the clock."""
        for key in ("every_minutes", "before"):
            value = getattr(checkpoint, key)
            if self.deterministic and value is not None:
                raise ValueError(
                    f"checkpoint.{key}={value} saves by the clock, and debug.deterministic=true leaves it nothing to "
                    f"decide: save by checkpoint.every and set checkpoint.{key}=null, or debug.deterministic=false"
                )


class Debug(OfflineDebug):
    check_layouts: bool = False
    """Before every rollout compare its copy of the weights with the trained ones, number by number on the host."""
