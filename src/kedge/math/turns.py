"""Turns of an episode as single actions: pure functions of turn numbers per token.

Turn numbers int64 [B, R] count the turns of each row from 0; tokens of a turn are consecutive, and
-1 marks tokens outside of all turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.math.advantage import rewards_to_go


def number_turns(mask: Tensor) -> Tensor:
    """Turn numbers of the runs of True in each row.  bool [B, R] -> int64 [B, R]."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return torch.where(mask, starts.cumsum(1) - 1, -1)


def turn_starts(turn: Tensor) -> Tensor:
    """The first token of each turn.  int64 [B, R] -> bool [B, R]."""
    starts = turn >= 0
    starts[:, 1:] &= turn[:, 1:] != turn[:, :-1]
    return starts


def segment_sum(x: Tensor, turn: Tensor) -> Tensor:
    """The sum of ``x`` over each turn, at every token of the turn; 0 outside.

    Args:
        x: float32 [B, R].
        turn: int64 [B, R]; turn numbers.

    Returns:
        float32 [B, R].
    """
    inside = turn >= 0
    index = torch.where(inside, turn, 0)
    sums = torch.zeros_like(x).scatter_add_(1, index, torch.where(inside, x, 0.0))
    return torch.where(inside, sums.gather(1, index), 0.0)


def broadcast_turns(x: Tensor, turn: Tensor) -> Tensor:
    """Repeat the value of ``x`` float32 [B, R] at a turn's first token over the turn."""
    return segment_sum(torch.where(turn_starts(turn), x, 0.0), turn)


def turn_returns(rewards: Tensor, turn: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted sum of rewards from each turn on, at its first token; 0 elsewhere.

        G_k = R_k + gamma G_{k+1}        R_k = sum of r_t over the tokens of turn k

    Args:
        rewards: float32 [B, R].
        turn: int64 [B, R]; turn numbers.
        gamma: discount per turn.

    Returns:
        float32 [B, R].
    """
    return rewards_to_go(segment_sum(rewards, turn), turn_starts(turn), gamma=gamma)


def turn_groups(turn: Tensor, group: Tensor) -> Tensor:
    """Group ids of turns: equal for turns with the same number in rows of the same group.

    int64 [B, R], int64 [B] -> int64 [n], in the order of ``turn_starts(turn).nonzero()``.
    """
    _, index = group.unique(return_inverse=True)
    starts = turn_starts(turn)
    most = int(turn.max()) + 1 if turn.numel() else 1
    return (index[:, None] * most + turn)[starts]
