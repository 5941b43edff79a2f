"""Rollout engines made of rollout engines."""

from kedge.backends.rollout.sharded import EngineInputs, ShardedEngine, start_all
from kedge.backends.rollout.shared import RankSharedEngine, shared

__all__ = ["EngineInputs", "RankSharedEngine", "ShardedEngine", "shared", "start_all"]
