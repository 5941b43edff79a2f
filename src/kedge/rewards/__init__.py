"""Reward models and reward functions."""

from kedge.rewards.build import RewardOptions, check_sources, reward_source
from kedge.rewards.function import RewardFunction
from kedge.rewards.mixture import Mixture
from kedge.rewards.model import RewardModel
from kedge.rewards.texts import TextCache

__all__ = [
    "Mixture",
    "RewardFunction",
    "RewardModel",
    "RewardOptions",
    "TextCache",
    "check_sources",
    "reward_source",
]
