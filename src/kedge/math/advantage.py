"""From rewards to advantages.  Pure; every function states its formula."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    after: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimation, one trajectory per row.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    V after the last real token is ``after``, by default 0 (the episode has ended).  Tokens off
    the mask inside a row (tool output) carry no advantage and are stepped over.
    Schulman et al. 2016, eq. 16 (arXiv:1506.02438).

    Args:
        rewards: float32 [B, R].
        values: float32 [B, R]; V of the state before token t.
        mask: bool [B, R].
        gamma: discount per token.
        lam: lambda.
        after: float32 [B]; V of the state after the last token, for responses that were cut off.

    Returns:
        float32 [B, R], 0 off the mask.
    """
    coming = torch.zeros_like(values[:, 0]) if after is None else after
    advantage = torch.zeros_like(coming)
    out = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * coming - values[:, t]
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        coming = torch.where(here, values[:, t], coming)
        out[:, t] = torch.where(here, advantage, 0.0)
    return out
