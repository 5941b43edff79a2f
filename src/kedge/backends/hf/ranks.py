"""What processes that train together tell each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kedge.math.sequences import widened
from kedge.types import Experience

_LEFT = ("prompt_ids", "prompt_mask")  # padded on the left
_UNUSED = {"support": -1}  # what stands in empty places, where that is not 0


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
    held = {f.name: x for f in fields(mine) if (x := getattr(mine, f.name)) is not None}
    pooled = {}
    for name, x in held.items():
        sizes = torch.tensor(x.shape[1:], device=device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        sent = x.byte() if x.dtype == torch.bool else x
        fill = _UNUSED.get(name, 0)
        sent = widened(sent, sizes.tolist(), left=name in _LEFT, fill=fill).to(device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(ranks)]
        dist.all_gather(parts, sent)
        pooled[name] = torch.cat(parts).to(device=x.device, dtype=x.dtype)
    return replace(mine, **pooled)
