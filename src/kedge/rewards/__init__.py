"""Reward models and reward functions."""

from kedge.rewards.build import FunctionOptions, ModelOptions, check_sources, reward_source
from kedge.rewards.function import MetricCapturingSource, RewardFunction, RewardLog
from kedge.rewards.mixture import EosPenalty, Mixture, columns_read
from kedge.rewards.model import RewardModel
from kedge.rewards.texts import TextCache

__all__ = [
    "EosPenalty",
    "FunctionOptions",
    "MetricCapturingSource",
    "Mixture",
    "ModelOptions",
    "RewardFunction",
    "RewardLog",
    "RewardModel",
    "TextCache",
    "check_sources",
    "columns_read",
    "reward_source",
]
