"""An algorithm: two pure functions and the inputs they require."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kedge.math.masked import AllReduce, one_rank
from kedge.types import (
    AdvantageOutput,
    Loss,
    MicroBatch,
    ModelOutputs,
    PolicyOutput,
    RewardOutput,
    Rollout,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Everything known about a batch when advantages are computed.

    ``rollout.loss_mask`` is already False on rows whose reward is not valid.  Tokens in
    ``excluded`` have rewards and are part of returns and group baselines, but do not train:
    statistics of advantages, such as whitening, are those of ``trained``.
    """

    rollout: Rollout
    reward_output: RewardOutput
    model_outputs: ModelOutputs
    all_reduce: AllReduce = field(default=one_rank)
    excluded: Tensor | None = None  # bool [B, R]; tokens too old, or rejected by the correction

    @property
    def trained(self) -> Tensor:
        """Tokens that are trained on, bool [B, R]."""
        mask = self.rollout.loss_mask
        return mask if self.excluded is None else mask & ~self.excluded


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How advantages are computed, and the loss that uses them.

    Args:
        name: shown in logs and model cards.
        compute_advantages: ``(inputs, kl_coef) -> AdvantageOutput``, called once per iteration
            without gradient.
        loss: ``(policy output, micro-batch) -> Loss``: a weighted sum, never a mean.
        needs_values: a value model predicts V before each response token.
        needs_reference: the reference policy's log-probabilities are computed.
        needs_full_kl: the exact KL over the vocabulary is computed per token.
        weighting: weights of tokens in the loss, a key of ``kedge.math.loss_weights.WEIGHTINGS``.
        min_group: smallest number of responses per prompt that the algorithm supports.
        extra_column: scores are placed one slot after the last token, if there is room.
        needs_greedy: the greedy response to each prompt is sampled and scored, too.
        resample: rounds in which groups of equal scores are replaced by other prompts (DAPO).
        metrics: names it may log in addition to ``kedge.loop.metrics.OF_ALL_ALGORITHMS``.
    """

    name: str
    compute_advantages: Callable[[AdvantageInputs, float], AdvantageOutput]
    loss: Callable[[PolicyOutput, MicroBatch], Loss]
    needs_values: bool = False
    needs_reference: bool = True
    needs_full_kl: bool = False
    weighting: str = "token_mean"
    min_group: int = 1
    extra_column: bool = False
    needs_greedy: bool = False
    resample: int = 0
    metrics: tuple[str, ...] = ()
