"""Tools in the classic API: ``TextEnvironment`` and the ``TextHistory`` of an episode."""

from kedge.classic.environment.text_environment import TextEnvironment
from kedge.classic.environment.text_history import TextHistory

__all__ = ["TextEnvironment", "TextHistory"]
