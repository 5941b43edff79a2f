"""Inputs of an advantage computation, for the tests of the N+ details."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kedge.algorithms import AdvantageInputs
from kedge.types import Experience, MicroBatch, ModelOutputs, PromptBatch, RewardOutput, Rollout

LENGTHS = [3, 5, 1, 4]


def evidence(**annotation: Tensor) -> AdvantageInputs:
    """Four responses of 3, 5, 1 and 4 tokens in 5 slots; the second was cut off."""
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    shape = mask.shape
    prompts = PromptBatch(
        ids=torch.ones(4, 2, dtype=torch.long),
        mask=torch.ones(4, 2, dtype=torch.bool),
        group=torch.arange(4),
        row=torch.arange(4),
    )
    rollout = Rollout(
        prompts=prompts,
        ids=torch.ones(shape, dtype=torch.long),
        loss_mask=mask,
        response_mask=mask,
        terminated=torch.tensor([True, False, True, True]),
        version=torch.zeros(4, dtype=torch.long),
    )
    note = {
        "logprobs": torch.randn(shape, generator=g),
        "ref_logprobs": torch.randn(shape, generator=g),
        "values": torch.randn(shape, generator=g),
    } | annotation
    judged = RewardOutput(
        scores=torch.tensor([1.0, -2.0, 0.5, 3.0]), valid=torch.ones(4, dtype=torch.bool)
    )
    return AdvantageInputs(
        rollout=rollout, reward_output=judged, model_outputs=ModelOutputs(**note)
    )


def experience(e: AdvantageInputs, advantage_output: Any) -> MicroBatch:
    x = Experience(
        prompt_ids=e.rollout.prompts.ids,
        prompt_mask=e.rollout.prompts.mask,
        ids=e.rollout.ids,
        loss_mask=e.rollout.loss_mask,
        response_mask=e.rollout.response_mask,
        value_mask=advantage_output.value_mask,
        old_logprobs=e.model_outputs.logprobs,
        rewards=advantage_output.rewards,
        advantages=advantage_output.advantages,
        old_values=e.model_outputs.values,
        returns=advantage_output.returns,
    )
    mask, spare = x.loss_mask.float(), x.value_mask.float()
    alive = x.loss_mask.any(1).float()
    return MicroBatch(
        rows=x,
        token_weight=mask / mask.sum(),
        value_weight=spare / spare.sum(),
        row_weight=alive / alive.sum(),
    )
