"""Small batches for algorithms: evidence for credit, micro-batches for losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kedge.algorithms import AdvantageInputs, Algorithm
from kedge.math.losses import WEIGHTINGS, row_mean
from kedge.math.masked import one_rank
from kedge.records.types import (
    AdvantageOutput,
    Experience,
    MicroBatch,
    ModelOutputs,
    PolicyOutput,
    PromptBatch,
    RewardOutput,
    Rollout,
)


def prefix(lengths: list[int], width: int | None = None) -> Tensor:
    return torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]


def rollout(mask: Tensor, *, group: Any = None, prompts: Any = None, **changes: Any) -> Rollout:
    """Responses whose tokens are those of ``mask``, to prompts of one token."""
    rows = len(mask)
    every = torch.arange(rows)
    group = every if group is None else torch.as_tensor(group)
    ones = torch.ones(rows, 1, dtype=torch.bool)
    fields = {
        "prompts": prompts or PromptBatch(ids=ones.long(), mask=ones, group=group, row=every),
        "ids": torch.ones(mask.shape, dtype=torch.int64),
        "loss_mask": mask,
        "response_mask": mask,
        "terminated": ones[:, 0],
        "policy_version": torch.zeros(rows, dtype=torch.int64),
    }
    return Rollout(**fields | changes)


def evidence(
    scores: list[float | None],
    group: list[int],
    *,
    lengths: list[int] | None = None,
    kl: Any = None,
    finished: list[bool] | None = None,
    all_reduce: Callable[[Tensor], Tensor] = one_rank,
    values: Any = None,
    **reward_output: Any,
) -> AdvantageInputs:
    """A batch; a score of None could not be given.  ``kl`` is log p - log q per token."""
    rows = len(scores)
    present = prefix(lengths or [2] * rows)
    valid = torch.tensor([s is not None for s in scores])
    shape = present.shape
    log_ratio = torch.zeros(shape) if kl is None else torch.as_tensor(kl, dtype=torch.float32)
    return AdvantageInputs(
        rollout=rollout(
            present,
            group=group,
            loss_mask=present & valid[:, None],
            terminated=torch.tensor(finished or [True] * rows),
        ),
        reward_output=RewardOutput(
            scores=torch.tensor([float("nan") if s is None else s for s in scores]),
            valid=valid,
            **reward_output,
        ),
        model_outputs=ModelOutputs(
            logprobs=torch.full(shape, -1.0),
            ref_logprobs=-1.0 - log_ratio,
            values=None if values is None else torch.as_tensor(values, dtype=torch.float32),
        ),
        all_reduce=all_reduce,
    )


def micro_batch(
    algorithm: Algorithm,
    advantages: Tensor,
    mask: Tensor,
    *,
    old: Tensor,
    ref: Tensor | None = None,
    mu: Tensor | None = None,
) -> MicroBatch:
    """One optimizer step in one piece."""
    rows = Experience(
        prompt_ids=torch.zeros(len(mask), 1, dtype=torch.int64),
        prompt_mask=torch.ones(len(mask), 1, dtype=torch.bool),
        ids=torch.zeros(mask.shape, dtype=torch.int64),
        loss_mask=mask,
        response_mask=mask,
        value_mask=mask,
        old_logprobs=old,
        rewards=torch.zeros(mask.shape),
        advantages=advantages * mask,
        ref_logprobs=ref,
        behavior_logprobs=mu,
    )
    weight = WEIGHTINGS[algorithm.weighting](mask, one_rank)
    return MicroBatch(
        rows=rows, token_weight=weight, value_weight=weight, row_weight=row_mean(mask, one_rank)
    )


def output(logprobs: Tensor, mask: Tensor) -> PolicyOutput:
    """A forward pass that found ``logprobs``."""
    return PolicyOutput(logprobs=logprobs * mask, entropy=torch.ones(mask.shape) * mask)


def advantages(advantage_output: AdvantageOutput) -> list[float]:
    """The advantage of each row, which must be that of all its tokens."""
    return advantage_output.advantages[:, 0].tolist()
