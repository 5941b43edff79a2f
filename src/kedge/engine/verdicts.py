"""What the scores of an evaluation say: share solved, pass@k, win rate."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.math.passing import pass_at_k


def solved(scores: Tensor, *, per_prompt: int, success: float) -> dict[str, float]:
    """``accuracy`` and ``pass@k`` for k = 2, 4, ... up to the completions of a prompt.

    Args:
        scores: float64 [rows], those of a prompt together; NaN where there is none.  Such a
            response counts neither way, and a prompt with fewer than k others is left out of
            pass@k.
        per_prompt: completions of each prompt.
        success: a score at least this solves the prompt.
    """
    tasks = scores.view(-1, per_prompt)
    known = ~tasks.isnan()
    samples, good = known.sum(1), ((tasks >= success) & known).sum(1)
    found: dict[str, float] = {}
    for k in _sizes(per_prompt):
        enough = samples >= k
        if enough.any():
            name = "accuracy" if k == 1 else f"pass@{k}"
            found[name] = float(pass_at_k(samples[enough], good[enough], k).mean())
    return found


def win_rate(scores: Tensor, start: Tensor) -> dict[str, float]:
    """``win_rate``: share of responses that score more than the start's, ties count half.

    Args:
        scores: float64 [rows]; NaN where there is none.
        start: the starting policy's scores of the same rows.
    """
    both = ~(scores.isnan() | start.isnan())
    if not both.any():
        return {}
    now, then = scores[both], start[both]
    return {"win_rate": float(((now > then).double() + 0.5 * (now == then)).mean())}


def _sizes(most: int) -> list[int]:
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return powers if most in powers else [*powers, most]


def everywhere(rows: int, index: Tensor, values: Tensor) -> Tensor:
    """A vector to be summed over ranks: this rank's values and a count of them, [2, rows]."""
    out = torch.zeros(2, rows, dtype=torch.float64)
    out[0, index] = values.double()
    out[1, index] = 1.0
    return out
