"""Which rows of a batch are sampled together, and how their responses become a rollout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import RolloutError
from kedge.rollout.embedded.generation import Responses
from kedge.types import PromptBatch, Rollout


def by_length(prompts: PromptBatch) -> tuple[Tensor, Tensor]:
    """Rows sorted by prompt length then group, and the group number of each, both int64 [B].

    Raises:
        RolloutError: rows of one group hold different prompts.
    """
    groups, number = prompts.group.unique(return_inverse=True)
    first = torch.full_like(groups, len(number)).scatter_reduce_(
        0, number, torch.arange(len(number)).to(number), "amin"
    )[number]
    same = (prompts.mask == prompts.mask[first]) & (
        (prompts.ids == prompts.ids[first]) | ~prompts.mask
    )
    if not same.all():
        row = int((~same.all(-1)).nonzero()[0])
        raise RolloutError(
            f"rows {int(first[row])} and {row} are of group {int(prompts.group[row])} but hold "
            "different prompts; rows share a group only if they answer the same prompt"
        )
    order = number.argsort(stable=True)
    order = order[prompts.mask.sum(-1)[order].argsort(stable=True)]
    return order, number[order]


def assemble(
    prompts: PromptBatch,
    order: Tensor,
    chunks: list[Responses],
    size: int,
    *,
    pad_id: int,
    version: int,
) -> Rollout:
    """The rows of all chunks, in the order of the prompts.

    Args:
        prompts: the prompts, on the host.
        order: int64 [B]; the row of each response.
        chunks: the responses.
        size: tokens per row of the result.
        pad_id: fills the result after the end of a response.
        version: of the weights.

    Raises:
        RolloutError: the model returned NaN.
    """
    original = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)[original]

    length = join([x.length for x in chunks])
    mask = torch.arange(size) < length[:, None]
    ids = join([_fit(x.tokens, size, pad_id) for x in chunks])
    logprobs = join([_fit(x.logprobs, size, 0.0) for x in chunks])
    if logprobs[mask].isnan().any():
        raise RolloutError(
            f"the model of version {version} returned NaN logits while sampling; "
            "lower the learning rate, or check the weights that were loaded"
        )
    allowed = [x.allowed for x in chunks if x.allowed is not None]
    return Rollout(
        prompts=prompts,
        ids=ids.masked_fill(~mask, pad_id),
        loss_mask=mask,
        response_mask=mask.clone(),
        terminated=join([x.terminated for x in chunks]),
        version=torch.full_like(length, version),
        behavior_logprobs=logprobs.masked_fill(~mask, 0.0),
        allowed_tokens=_join_allowed(allowed, size, join, mask) if allowed else None,
    )


def _fit(x: Tensor, size: int, fill: float) -> Tensor:
    """Cut or pad dimension 1 to ``size``."""
    if x.shape[1] >= size:
        return x[:, :size]
    pad = x.new_full((x.shape[0], size - x.shape[1], *x.shape[2:]), fill)
    return torch.cat([x, pad], dim=1)


def _join_allowed(parts: list[Tensor], size: int, join: Any, mask: Tensor) -> Tensor:
    width = max(x.shape[-1] for x in parts)
    wide = [nn.functional.pad(_fit(x, size, -1), (0, width - x.shape[-1]), value=-1) for x in parts]
    joined: Tensor = join(wide)
    return joined.masked_fill(~mask[..., None], -1)
