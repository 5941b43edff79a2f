"""From one score per response to one reward per token."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.math.masked import last_true


def place_score(scores: Tensor, mask: Tensor) -> Tensor:
    """Each row's score on its last True slot, 0 elsewhere; a row without a True gets nothing.

    Args:
        scores: float32 [B].
        mask: bool [B, R].

    Returns:
        float32 [B, R].
    """
    slots = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(slots == last_true(mask)[:, None], scores[:, None], 0.0)
