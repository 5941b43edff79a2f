"""What one source says, before several are mixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kedge.types import Judgement, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judgement that still tells "does not apply" from "failed"."""

    scores: Tensor  # float32 [B]; 0 where the source does not apply
    applies: Tensor  # bool [B]
    failed: Tensor  # bool [B]; the row is dropped, whatever other sources say
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # float32 [B], NaN: n/a
    token_rewards: Tensor | None = None  # float32 [B, R]; 0 where the source does not apply

    def judgement(self) -> Judgement:
        """The verdict as a judgement: rows that nobody scored are not valid."""
        return Judgement(
            scores=self.scores,
            valid=self.applies & ~self.failed,
            parts=self.parts,
            token_rewards=self.token_rewards,
        )


Pending = Callable[[], Verdict]


@runtime_checkable
class Starts(Protocol):
    """A reward source that can start its work before its result is asked for."""

    name: str

    def begin(self, rollout: Rollout) -> Pending:
        """Start scoring; calling the result waits for it."""
        ...


def verdict_of(judgement: Judgement) -> Verdict:
    """A finished judgement as a verdict: an invalid row has failed."""
    return Verdict(
        scores=torch.where(judgement.valid, judgement.scores.float(), 0.0),
        applies=judgement.valid,
        failed=~judgement.valid,
        parts=judgement.parts,
        token_rewards=judgement.token_rewards,
    )
