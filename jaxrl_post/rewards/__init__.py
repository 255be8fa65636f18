"""Graders: from prompts and completions to one number each."""

from jaxrl_post.rewards.reward import Reward, RewardError, build

__all__ = ["Reward", "RewardError", "build"]
