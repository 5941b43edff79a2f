"""Options of GRPOTrainer."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from kedge.config.base import OnPolicyConfig
from kedge.config.common import GroupArguments, KLEstimator
from kedge.config.declare import Bound, Natural, NonNegative, option
from kedge.records.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(repr=False)
class GRPOConfig(GroupArguments, OnPolicyConfig):
    """Options of ``kedge.GRPOTrainer``, with the defaults of TRL 1.16.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    SECTION: ClassVar[str] = "algorithm"

    exp_name: str = option("grpo_config", "The name of the experiment, which run_name uses.")
    learning_rate: float = option(1e-6, "The learning rate of the policy.")
    num_ppo_epochs: int = option(1, "How often each batch is trained on.")
    num_generations: int = option(8, "How many responses are sampled for each prompt, at least 2.")
    response_length: int = option(512, "The most tokens that a response may have.")
    temperature: float = option(
        1.0, "The sampling temperature. Training divides the logits by it, too."
    )
    kl_coef: float = option(
        0.0, "The weight of a KL penalty (k1) in the reward, in addition to beta."
    )

    # GRPO.
    epsilon: Bound = option(
        0.2, "The lower bound of the clip: the probability ratio is at least 1 - epsilon."
    )
    epsilon_high: Bound | None = option(
        None,
        "The upper bound of the clip: the ratio is at most 1 + this. If unset, epsilon. With "
        "loss_type=cispo it is the largest weight, and 5 if unset.",
    )
    delta: Annotated[float | None, Gt(1)] = option(
        None,
        "The largest ratio that counts for tokens with a negative advantage. Default: no limit.",
    )
    beta: NonNegative = option(
        0.0, "The weight of the KL in the loss. Above 0 the run needs a reference."
    )
    kl_estimator: KLEstimator = option(
        "k3", "How the KL in the loss is estimated from log-probabilities: k1, k2, k3 or abs."
    )
    use_bias_correction_kl: bool = option(
        True, "Multiply the KL in the loss by the probability ratio."
    )
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"] = option(
        "dapo",
        "How the loss averages over tokens (grpo, dr_grpo, dapo, bnpo), or cispo, which weighs "
        "tokens instead of clipping them.",
    )
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group",
        "Divide advantages by the standard deviation of the scores of the group or of the batch.",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize",
        "With several rewards: normalize their weighted sum, or normalize each of them within its "
        "group first (GDPO).",
    )
    importance_sampling_level: Literal["token", "sequence"] = option(
        "token",
        "Compute the ratio for each token, or for each response as the geometric mean of its "
        "tokens (sequence, GSPO).",
    )
    mask_truncated_completions: bool = option(
        False, "Leave responses that were cut off at the length limit out of the loss."
    )
    credit: Literal["token", "turn"] = option(
        "token", "What is compared within a group: whole responses, or turn by turn."
    )
    drop_uniform_groups: bool = option(
        False, "Leave groups whose scores are all equal out of the loss."
    )
    dynamic_sampling: Natural = option(
        0, "How many rounds of new prompts may replace groups whose scores are all equal (DAPO)."
    )
    overlong_buffer: Natural = option(
        0, "Over this many tokens before response_length the score drops by up to 1 (DAPO)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.importance_sampling_level == "sequence" and self.loss_type != "grpo":
            logger.warning(
                "importance_sampling_level='sequence' with loss_type=%r gives long responses more"
                " weight, since the loss sums over tokens; for GSPO set loss_type='grpo'",
                self.loss_type,
            )

    @property
    def loss_kl_coef(self) -> float:
        """Weight of the KL in the loss, in addition to ``kl_coef`` in the reward."""
        return self.beta

    def _check(self) -> None:
        super()._check()
        if self.kl_estimator == "full":
            raise ConfigError(
                "kl_estimator='full' needs the whole distribution, but the KL in the loss uses only"
                " the sampled tokens; set k1, k2, k3 or abs"
            )
        if self.overlong_buffer > self.response_length:
            raise ConfigError(
                f"overlong_buffer={self.overlong_buffer} must be at most"
                f" {self.length_option}={self.response_length}"
            )
        if self.multi_objective_aggregation == "normalize_then_sum":
            others = {
                "kl_coef": self.kl_coef,
                "missing_eos_penalty": self.missing_eos_penalty,
                "non_eos_penalty": self.non_eos_penalty,
                "overlong_buffer": self.overlong_buffer,
                "credit": self.credit if self.credit == "turn" else None,
            }
            if unread := [name for name, value in others.items() if value]:
                raise ConfigError(
                    f"{unread[0]}={others[unread[0]]!r} acts on the sum of the rewards, but with"
                    " multi_objective_aggregation='normalize_then_sum' each is compared; use beta"
                    " for the KL and a reward function for the penalty"
                )
        if self.loss_type == "cispo" and self.delta is not None:
            raise ConfigError(
                f"delta={self.delta} has no effect with loss_type='cispo'; leave delta unset"
            )
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            raise ConfigError(
                f"delta={self.delta} must be above 1 + epsilon_high={1 + high:g}; otherwise"
                " the clip at epsilon_high has no effect"
            )
