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
    device, prompts = rollout.ids.device, rollout.prompts
    ids = torch.cat([prompts.ids.to(device), rollout.ids], 1)
    real = torch.cat([prompts.mask.to(device), rollout.response_mask], 1)
    lengths = real.sum(1)
    order = (~real).long().argsort(dim=1, stable=True)
    return ids.gather(1, order)[:, : int(lengths.max())], lengths


def chunks(lengths: Tensor, *, rows: int, tokens: int = 1024) -> list[Tensor]:
    """Row numbers in groups to run together: longest first, with little padding.

    A group ends at ``rows`` rows, or where it holds ``tokens`` tokens and the next row is more than
    a tenth shorter than its first.

    Args:
        lengths: int64 [B]; tokens of each row.
        rows: the most rows in a group.
        tokens: groups smaller than this are not worth a forward pass of their own.
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
    """``ids`` with ``token`` behind the end of every row."""
    real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return torch.where(real, ids, token)
