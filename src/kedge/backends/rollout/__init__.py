"""Rollout engines made of rollout engines."""

from kedge.backends.rollout.sharded import ShardedEngine, start_all
from kedge.backends.rollout.shared import RankSharedEngine, shared

__all__ = ["RankSharedEngine", "ShardedEngine", "shared", "start_all"]
