"""Per-token rewards from one score per response."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.math.masked import last_true


def place_score(scores: Tensor, mask: Tensor) -> Tensor:
    """Each row's score at its last True, 0 elsewhere and in rows without a True.

    Args:
        scores: float32 [B].
        mask: bool [B, R].

    Returns:
        float32 [B, R].
    """
    slots = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(slots == last_true(mask)[:, None], scores[:, None], 0.0)


def move_last(x: Tensor, mask: Tensor, to: Tensor) -> Tensor:
    """``x`` [B, R] with what is at each row's last True of ``mask`` moved to that of ``to``."""
    if to is mask:
        return x
    last = x.gather(1, last_true(mask)[:, None].clamp(min=0))[:, 0]
    return x - place_score(last, mask) + place_score(last, to)


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int) -> Tensor:
    """0 up to ``longest - buffer`` tokens, then linearly down to -1 at ``longest``.

        (longest - buffer - l) / buffer        Soft overlong punishment of DAPO, arXiv:2503.14476

    Args:
        lengths: int64 [B], tokens of each response.
        longest: length limit of a response in tokens.
        buffer: tokens over which the penalty grows.

    Returns:
        float32 [B].
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)
