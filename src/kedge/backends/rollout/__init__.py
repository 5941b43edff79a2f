"""Rollout engines composed of other rollout engines."""

from kedge.backends.rollout.sharded import EngineInputs, ShardedEngine, start_all
from kedge.backends.rollout.shared import RankSharedEngine, build_shared_engine

__all__ = ["EngineInputs", "RankSharedEngine", "ShardedEngine", "build_shared_engine", "start_all"]
