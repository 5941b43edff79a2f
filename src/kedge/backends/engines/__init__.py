"""Rollout engines made of rollout engines."""

from kedge.backends.engines.shared import SharedEngine, shared
from kedge.backends.engines.split import SplitEngine, together

__all__ = ["SharedEngine", "SplitEngine", "shared", "together"]
