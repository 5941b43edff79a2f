"""The algorithms: one per file, composed from ``kedge.math``."""

from collections.abc import Callable

from kedge.algorithms.base import AdvantageInputs, Algorithm
from kedge.algorithms.grpo import grpo
from kedge.algorithms.ppo import ppo
from kedge.algorithms.reinforce_pp import reinforce_pp
from kedge.algorithms.remax import remax
from kedge.algorithms.rloo import rloo

BUILTIN: dict[str, Callable[..., Algorithm]] = {
    "ppo": ppo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "grpo": grpo,
    "remax": remax,
}

__all__ = ["BUILTIN", "AdvantageInputs", "Algorithm"]
__all__ += ["grpo", "ppo", "reinforce_pp", "remax", "rloo"]
