"""Reward models and reward functions."""

from kedge.backends.rewards.build import FunctionOptions, ModelOptions, check_sources, reward_source
from kedge.backends.rewards.eos import EosPenalty
from kedge.backends.rewards.function import RewardFunction
from kedge.backends.rewards.log import MetricCapturingSource, RewardLog
from kedge.backends.rewards.mixture import Mixture, columns_read
from kedge.backends.rewards.model import RewardModel
from kedge.backends.rewards.texts import TextCache

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
