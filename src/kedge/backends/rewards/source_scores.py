"""Scores of one reward source, before several are mixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kedge.types import RewardOutput, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScores:
    """A reward output that distinguishes "does not apply" from "failed"."""

    scores: Tensor  # float32 [B]; 0 where the source does not apply
    applies: Tensor  # bool [B]
    failed: Tensor  # bool [B]; the row is dropped, whatever other sources say
    components: Mapping[str, Tensor] = field(default_factory=dict)  # float32 [B], NaN: n/a
    token_rewards: Tensor | None = None  # float32 [B, R]; 0 where the source does not apply

    def to_reward_output(self) -> RewardOutput:
        """As a reward output: rows without a score are not valid."""
        return RewardOutput(
            scores=self.scores,
            valid=self.applies & ~self.failed,
            components=self.components,
            token_rewards=self.token_rewards,
        )


Pending = Callable[[], SourceScores]


@runtime_checkable
class AsyncRewardSource(Protocol):
    """A reward source that can start scoring before its result is needed."""

    name: str

    def begin(self, rollout: Rollout) -> Pending:
        """Start scoring; calling the result waits for it."""
        ...


def to_source_scores(reward_output: RewardOutput) -> SourceScores:
    """Convert a reward output; invalid rows count as failed."""
    return SourceScores(
        scores=torch.where(reward_output.valid, reward_output.scores.float(), 0.0),
        applies=reward_output.valid,
        failed=~reward_output.valid,
        components=reward_output.components,
        token_rewards=reward_output.token_rewards,
    )
