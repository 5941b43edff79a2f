"""Options of RLOOTrainer."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.config.algorithms import RLOOArguments
from kedge.config.base import OnPolicyConfig


@dataclass(repr=False)
class RLOOConfig(RLOOArguments, OnPolicyConfig):
    """Options of ``kedge.RLOOTrainer``, with the defaults of TRL up to 0.21."""
