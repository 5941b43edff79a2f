"""How often a task is solved: pass@k without bias."""

from __future__ import annotations

import torch
from torch import Tensor


def pass_at_k(samples: Tensor, solved: Tensor, k: int) -> Tensor:
    """Probability that at least one of k of a task's samples solves it.

    ``1 - C(n - c, k) / C(n, k)``: unbiased, where ``1 - (1 - c/n)^k`` is not.  As a product,
    ``1 - prod_{j<k} (n - c - j) / (n - j)``, it needs no large number.
    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.

    Args:
        samples: int [G]; n, samples drawn for each task, at least k.
        solved: int [G]; c, how many of them solve it.
        k: samples that one may try.

    Returns:
        float64 [G].

    Raises:
        ValueError: a task has fewer than k samples.
    """
    if k < 1 or bool((samples < k).any()):
        raise ValueError(f"pass@{k} needs k >= 1 and at least k samples of every task")
    n, failed = samples.double(), (samples - solved).double()
    miss = torch.ones_like(n)
    for j in range(k):
        miss = miss * ((failed - j).clamp(min=0) / (n - j))
    return 1 - miss
