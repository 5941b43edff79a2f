"""Settings of the learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kedge.ops.linear_logprob import TokenConstraints


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """How the learner computes; the optimizer's own settings are TrainingArguments."""

    total_iterations: int  # iterations covered by the learning-rate schedule
    value_warmup_steps: int = 0  # iterations before the policy's schedule begins
    temperature: float = 1.0  # divides the logits, as in sampling
    min_new_tokens: int = 0  # stop tokens are banned before this many
    stop_ids: tuple[int, ...] = ()
    value_learning_rate: float | None = None  # None: same as the policy's
    # Maximum gradient norm per model; 0 turns clipping off. A value head on the policy's backbone
    # belongs to the policy's model.
    max_grad_norm: float = 1.0
    forward_rows: int = 64  # rows of one forward pass without gradient
    # padding tokens that cost less than one more pass; None: estimated from the model's size
    padding_budget: int | None = None
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    checkpointing_options: Mapping[str, Any] | None = None  # for torch.utils.checkpoint
    # use the rollout engine's log-probabilities if its weights were the same
    reuse_behavior_logprobs: bool = False
    allow_low_precision_weights: bool = False  # train bf16 or fp16 weights
    entropy_grad: bool = False  # the loss has an entropy bonus
    cache_trunk: bool = True  # compute the states below the trained layers once per batch

    def constraints(self, tokens: Tensor, allowed_tokens: Tensor | None) -> TokenConstraints:
        """Constraints at the marked tokens bool [b, R]; ``allowed_tokens`` int64 [b, R, K]."""
        banned = None
        if self.min_new_tokens and self.stop_ids:
            banned = (tokens.nonzero()[:, 1] < self.min_new_tokens, self.stop_ids)
        return TokenConstraints(
            temperature=self.temperature,
            banned=banned,
            allowed_tokens=None if allowed_tokens is None else allowed_tokens[tokens],
        )

    reference_sync_steps: int = 0  # iterations between moves of the reference; 0: never
    reference_mixup: float = 0.6  # share of the policy in the new reference
