"""Options of the Trainer-style PPOTrainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from kedge.config.algorithms import PPOArguments, find_recipe
from kedge.config.base import OnPolicyConfig

Config = TypeVar("Config", bound="PPOConfig")


@dataclass(repr=False)
class PPOConfig(PPOArguments, OnPolicyConfig):
    """Options of ``kedge.PPOTrainer``: ``transformers.TrainingArguments`` plus those of PPO."""

    @classmethod
    def recipe(cls: type[Config], name: str, **changes: Any) -> Config:
        """The config of a set of options that were published together, with changes.

        Args:
            name: "sao", single-rollout asynchronous PPO for agents; "agent", today's PPO in
                environments (docs/recipes.md).
            changes: other options, which override those of the recipe.
        """
        return cls(**{**find_recipe(name), **changes})
