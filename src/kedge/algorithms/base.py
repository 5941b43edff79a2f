"""An algorithm is two pure functions and what they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kedge.types import (
    AdvantageOutput,
    Loss,
    MicroBatch,
    ModelOutputs,
    PolicyOutput,
    RewardOutput,
    Rollout,
)


def one_rank(x: Tensor) -> Tensor:
    """The sum over all ranks when there is one."""
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Everything known about a batch when credit is assigned.

    ``rollout.mask`` is already False on rows whose reward output is not valid.
    """

    rollout: Rollout
    reward_output: RewardOutput
    model_outputs: ModelOutputs
    total: Callable[[Tensor], Tensor] = field(default=one_rank)  # sum over ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A algorithm: how credit is assigned, and the loss that uses it.

    Args:
        name: shown in logs and model cards.
        advantage_output: ``(evidence, kl_coef) -> AdvantageOutput``, run once per batch without
            gradient.
        loss: ``(policy output, micro-batch) -> Loss``, already weighted, never averaged.
        needs_values: a value model predicts V before every response token.
        needs_reference: the reference policy's log-probabilities are computed.
        needs_full_kl: the KL over the whole vocabulary is computed per token.
        weighting: how tokens share the loss, a name in ``kedge.math.loss_weights.WEIGHTINGS``.
        min_group: responses per prompt below which the algorithm is undefined.
        extra_slot: scores are placed one slot after the last token, where engines leave room.
        needs_greedy: the greedy response to each prompt is sampled and scored too.
        whole_responses: the loss has one advantage per response, which is that of its first token.
        resample: rounds in which groups of equal scores are sampled anew for other prompts.
    """

    name: str
    compute_advantages: Callable[[AdvantageInputs, float], AdvantageOutput]
    loss: Callable[[PolicyOutput, MicroBatch], Loss]
    needs_values: bool = False
    needs_reference: bool = True
    needs_full_kl: bool = False
    weighting: str = "token_mean"
    min_group: int = 1
    extra_slot: bool = False
    needs_greedy: bool = False
    whole_responses: bool = False
    resample: int = 0
