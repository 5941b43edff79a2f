"""Rollout engines made of rollout engines."""

from kedge.backends.engines.split import SplitEngine

__all__ = ["SplitEngine"]
