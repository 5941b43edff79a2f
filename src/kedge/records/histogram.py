"""The range of probability ratios over all ranks, from a histogram."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_FINEST, _PER_OCTAVE, _BINS = 2.0**-24, 64, 2048  # log ratios of 6e-8 to 256, on each side of 0


def ratio_range(
    log_ratio: Tensor, all_reduce: Callable[[Tensor], Tensor], *, rank: int, world_size: int
) -> dict[str, float]:
    """The smallest and the largest ratio of all ranks and two quantiles; empty without tokens.

    Quantiles are read from a histogram, whose logarithms are off by at most 0.6%: its sum over
    ranks is small, and gives every number of ranks the same quantiles.

    Args:
        log_ratio: float [n], NaN where a token does not count.
        all_reduce: sums over ranks.
        rank: this rank.
        world_size: number of ranks.

    Returns:
        Ratios named ``min``, ``p01``, ``p99``, ``max``.
    """
    x = log_ratio.detach().float()
    x = x[~x.isnan()].clamp(-700.0, 700.0)  # an infinite one is what these numbers are for
    octaves = (x.abs() / _FINEST).log2() * _PER_OCTAVE
    bins = (octaves.floor().clamp(-1, _BINS - 1) + 1) * x.sign() + _BINS
    counts = torch.bincount(bins.long(), minlength=2 * _BINS + 1).cpu().double()
    ends = torch.zeros(3, world_size, dtype=torch.float64)
    if len(x):
        ends[:, rank] = torch.stack([x.min(), x.max(), torch.ones_like(x[0])]).cpu().double()
    reduced = all_reduce(torch.cat([counts, ends.flatten()])).cpu()
    counts, ends = reduced[: -ends.numel()], reduced[-ends.numel() :].view(3, world_size)
    if not counts.sum():
        return {}
    low, high = float(ends[0][ends[2] > 0].min()), float(ends[1][ends[2] > 0].max())
    found = {"min": low, "max": high}
    for name, share in (("p01", 0.01), ("p99", 0.99)):
        place = math.floor(share * (float(counts.sum()) - 1))
        number = int((counts.cumsum(0) <= place).sum()) - _BINS
        size = _FINEST * 2 ** ((abs(number) - 0.5) / _PER_OCTAVE)
        found[name] = min(max(math.copysign(size, number) if number else 0.0, low), high)
    return {name: math.exp(min(value, 700.0)) for name, value in found.items()}
