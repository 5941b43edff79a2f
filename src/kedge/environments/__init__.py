"""Multi-turn tasks: environments, and the rollout engine that plays them."""

from kedge.environments.episode import EpisodeLimits, EpisodeReward
from kedge.environments.rollout import EnvironmentRollouts, FunctionRollouts
from kedge.environments.tools import ToolEnvironment, tool_environments
from kedge.records.protocols import Environment, NewContext, Observation
from kedge.records.types import Episodes, Response, ToolCall

__all__ = [
    "Environment",
    "EnvironmentRollouts",
    "EpisodeLimits",
    "EpisodeReward",
    "Episodes",
    "FunctionRollouts",
    "NewContext",
    "Observation",
    "Response",
    "ToolCall",
    "ToolEnvironment",
    "tool_environments",
]
