"""What processes that train together tell each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kedge.records import widen_field
from kedge.types import Experience


def level(models: Iterable[nn.Module]) -> None:
    """Give every rank the weights of the first."""
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


def total(x: Tensor, device: torch.device) -> Tensor:
    """Sum of ``x`` over all ranks, on the device it came from."""
    summed = x.to(device, copy=True)
    dist.all_reduce(summed)
    return summed.to(x.device)


def pool_rows(mine: Experience, device: torch.device, ranks: int) -> Experience:
    """The rows of all ranks, in rank order, as wide as the widest; every rank has equally many."""
    pooled = {}
    for f in fields(mine):
        x = getattr(mine, f.name)
        if x is None:
            continue
        sizes = torch.tensor(x.shape[1:], device=device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        sent = x.byte() if x.dtype == torch.bool else x
        sent = widen_field(f, sent, sizes.tolist()).to(device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(ranks)]
        dist.all_gather(parts, sent)
        pooled[f.name] = torch.cat(parts).to(device=x.device, dtype=x.dtype)
    return replace(mine, **pooled)
