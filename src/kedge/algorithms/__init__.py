"""Learning rules: each file is one algorithm, composed from ``kedge.math``."""

from kedge.algorithms.base import Algorithm, Evidence
from kedge.algorithms.ppo import ppo

BUILTIN = {"ppo": ppo}

__all__ = ["BUILTIN", "Algorithm", "Evidence", "ppo"]
