"""Reward models and reward functions."""

from kedge.rewards.build import FunctionOptions, ModelOptions, check_sources, reward_source
from kedge.rewards.function import MetricCapturingSource, RewardFunction, RewardLog
from kedge.rewards.mixture import Mixture
from kedge.rewards.model import RewardModel
from kedge.rewards.texts import TextCache

__all__ = [
    "FunctionOptions",
    "MetricCapturingSource",
    "Mixture",
    "ModelOptions",
    "RewardFunction",
    "RewardLog",
    "RewardModel",
    "TextCache",
    "check_sources",
    "reward_source",
]
