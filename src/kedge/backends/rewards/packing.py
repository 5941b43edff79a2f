"""Rows of a rollout as right-padded token sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.types import Rollout


def packed(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Prompt and response of every row, without padding between or before them.

    Returns:
        ids: int64 [B, L]; what follows a row's end is arbitrary.
        lengths: int64 [B]; real tokens of each row.
    """
    ids = torch.cat([rollout.prompts.ids, rollout.ids], 1)
    real = torch.cat([rollout.prompts.mask, rollout.present], 1)
    lengths = real.sum(1)
    order = (~real).long().argsort(dim=1, stable=True)
    return ids.gather(1, order)[:, : int(lengths.max())], lengths


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token lists, right-padded with 0: ids int64 [B, L], lengths int64 [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), lengths
