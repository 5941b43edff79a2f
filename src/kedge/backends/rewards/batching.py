"""Right-padded token batches for reward models."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.types import Rollout


def packed(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Prompt and response of every row, joined without padding before or between them.

    Returns:
        ids: int64 [B, L]; arbitrary after a row's end.
        lengths: int64 [B]; real tokens of each row.
    """
    device, prompts = rollout.ids.device, rollout.prompts
    ids = torch.cat([prompts.ids.to(device), rollout.ids], 1)
    real = torch.cat([prompts.mask.to(device), rollout.response_mask], 1)
    lengths = real.sum(1)
    order = (~real).long().argsort(dim=1, stable=True)
    return ids.gather(1, order)[:, : int(lengths.max())], lengths


def chunks(lengths: Tensor, *, rows: int, tokens: int = 1024) -> list[Tensor]:
    """Groups of row numbers to run together: longest first, with little padding.

    A group ends at ``rows`` rows, or when it holds ``tokens`` tokens and the next row is more than
    10% shorter than its first.

    Args:
        lengths: int64 [B]; tokens of each row.
        rows: most rows in a group.
        tokens: a smaller group does not justify a separate forward pass.
    """
    order = lengths.argsort(descending=True, stable=True)
    groups: list[list[int]] = []
    longest = 0
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        full = bool(groups) and (
            len(groups[-1]) == rows
            or (len(groups[-1]) * longest >= tokens and length < 0.9 * longest)
        )
        if full or not groups:
            groups.append([])
            longest = length
        groups[-1].append(row)
    return [torch.tensor(group, device=lengths.device) for group in groups]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token lists, right-padded with 0: ids int64 [B, L], lengths int64 [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64)
    return ids, lengths


def filled(ids: Tensor, lengths: Tensor, token: int) -> Tensor:
    """``ids`` with ``token`` after the end of every row."""
    real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return torch.where(real, ids, token)
