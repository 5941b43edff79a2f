"""Inputs of an advantage computation, for the tests of the N+ details."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kedge.algorithms import AdvantageInputs
from kedge.types import Experience, MicroBatch, ModelOutputs
from tests.unit.advantage_inputs import evidence as by_hand

LENGTHS = [3, 5, 1, 4]


def evidence() -> AdvantageInputs:
    """Four responses of 3, 5, 1 and 4 tokens in 5 slots; the second was cut off."""
    g = torch.Generator().manual_seed(0)
    finished = [True, False, True, True]
    e = by_hand([1.0, -2.0, 0.5, 3.0], [0, 1, 2, 3], lengths=LENGTHS, finished=finished)
    logprobs, reference, values = (torch.randn(4, 5, generator=g) for _ in range(3))
    outputs = ModelOutputs(logprobs=logprobs, ref_logprobs=reference, values=values)
    return replace(e, model_outputs=outputs)


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
