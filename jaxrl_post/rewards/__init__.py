"""Graders: from prompts and completions to one number each."""

from jaxrl_post.rewards.grader import Grader, RewardError
from jaxrl_post.rewards.model import Setting
from jaxrl_post.rewards.reward import Reward, Scores, build

__all__ = ["Grader", "Reward", "RewardError", "Scores", "Setting", "build"]
