"""Options of GRPOTrainer."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kedge.config.base import KLEstimator, OnPolicyConfig
from kedge.config.compat.trl import NEWER, NewerArguments, settle_newer
from kedge.config.declare import check_fields, option
from kedge.config.option_status import FIELD_SUPPORT
from kedge.config.options import Honored, Ignored, Moved, Refused, Support, apply_support
from kedge.errors import ConfigError
from kedge.suggestions import named

logger = logging.getLogger(__name__)

_GRPO = "algorithm: kedge.algorithms.grpo"
_ENTROPY = Refused("there is no entropy bonus", "leave it at its default")
_SAPO = Refused("this loss is not implemented", "leave it at its default")
_VLLM_WEIGHTS = Honored("engine: importance weights of the learner against vLLM")

GRPO_SUPPORT: dict[str, Support] = {
    **FIELD_SUPPORT,
    **NEWER,
    **dict.fromkeys(
        (
            "epsilon",
            "epsilon_high",
            "delta",
            "beta",
            "kl_estimator",
            "use_bias_correction_kl",
            "loss_type",
            "scale_rewards",
            "importance_sampling_level",
            "mask_truncated_completions",
            "drop_uniform_groups",
            "dynamic_sampling",
            "overlong_buffer",
        ),
        Honored(_GRPO),
    ),
    "cast_lm_head_to_fp32": Ignored("training logits are always float32", also=(True,)),
    "multi_objective_aggregation": Refused(
        "rewards are weighted and summed before normalization", "leave it at its default"
    ),
    "top_entropy_quantile": Refused(
        "the loss always covers every token", "leave it at its default"
    ),
    "max_tool_calling_iterations": Refused("tool calling is not supported", "leave it unset"),
    "off_policy_mask_threshold": Refused(
        "sampler_correction handles off-policy responses", "set sampler_correction instead"
    ),
    **dict.fromkeys(
        (
            "entropy_coef",
            "use_adaptive_entropy",
            "entropy_coef_min",
            "entropy_coef_max",
            "entropy_coef_delta",
            "entropy_target",
        ),
        _ENTROPY,
    ),
    **dict.fromkeys(
        (
            "sapo_temperature_neg",
            "sapo_temperature_pos",
            "vespo_k_pos",
            "vespo_lambda_pos",
            "vespo_k_neg",
            "vespo_lambda_neg",
        ),
        _SAPO,
    ),
    **dict.fromkeys(
        (
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
        ),
        _VLLM_WEIGHTS,
    ),
    "vllm_importance_sampling_cap": Moved("vllm_importance_sampling_clip_max"),
}


def _refused(default: Any) -> Any:
    return option(default, "Not supported.")


@named("option")
@dataclass(repr=False)
class GRPOConfig(NewerArguments, OnPolicyConfig):
    """Options of ``kedge.GRPOTrainer``, with the names and defaults of TRL 1.16.

    ``max_completion_length``, ``num_iterations``, ``steps_per_generation`` and
    ``generation_batch_size`` are converted to ``response_length``, ``num_ppo_epochs`` and
    ``num_mini_batches`` on construction.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    SUPPORT: ClassVar[Mapping[str, Support]] = GRPO_SUPPORT

    exp_name: str = option("grpo_config", "Name of the experiment.")
    learning_rate: float = option(1e-6, "Learning rate.")
    num_ppo_epochs: int = option(1, "Passes over each batch of responses.")
    num_generations: int = option(8, "Responses per prompt, at least 2.")
    response_length: int = option(512, "Maximum length of a response, in tokens.")
    temperature: float = option(1.0, "Sampling temperature; divides the logits in training too.")
    kl_coef: float = option(0.0, "Weight of a KL penalty (k1) in the reward, in addition to beta.")

    # GRPO.
    epsilon: float = option(
        0.2, "Lower clip: the probability ratio is at least 1 - epsilon.", gt=0, le=math.inf
    )
    epsilon_high: float | None = option(
        None,
        "Upper clip: the ratio is at most 1 + this. Unset: epsilon. With cispo the largest weight; "
        "unset: 5.",
        gt=0,
        le=math.inf,
    )
    delta: float | None = option(None, "Largest ratio of tokens with negative advantage.", gt=1)
    beta: float = option(0.0, "Weight of the KL in the loss; above 0 needs a reference.", ge=0)
    kl_estimator: KLEstimator = option("k3", "Estimator of the KL in the loss: k1, k2, k3, abs.")
    use_bias_correction_kl: bool = option(True, "Multiply the KL in the loss by the ratio.")
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"] = option(
        "dapo", "How the loss averages tokens, or cispo; see kedge.algorithms.grpo."
    )
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group",
        "Divide advantages by the standard deviation of the scores of the group or the batch.",
        accepts=Literal["group", "batch", "none"] | bool,
    )
    importance_sampling_level: Literal["token", "sequence"] = option(
        "token", "Ratio per token, or per sequence (GSPO): the geometric mean over the response."
    )
    mask_truncated_completions: bool = option(
        False, "Exclude responses that were truncated at the length limit from the loss."
    )
    drop_uniform_groups: bool = option(False, "Exclude groups with equal scores from the loss.")
    dynamic_sampling: int = option(
        0, "Most rounds of replacing groups with equal scores by new prompts (DAPO).", ge=0
    )
    overlong_buffer: int = option(
        0, "Tokens before response_length over which the score drops by up to 1 (DAPO).", ge=0
    )
    cast_lm_head_to_fp32: bool = option(False, "No effect: training logits are always float32.")
    sapo_temperature_neg: float = _refused(1.05)
    sapo_temperature_pos: float = _refused(1.0)
    vespo_k_pos: float = _refused(2.0)
    vespo_lambda_pos: float = _refused(3.0)
    vespo_k_neg: float = _refused(3.0)
    vespo_lambda_neg: float = _refused(2.0)
    multi_objective_aggregation: str = _refused("sum_then_normalize")
    top_entropy_quantile: float = _refused(1.0)
    entropy_coef: float = _refused(0.0)
    use_adaptive_entropy: bool = _refused(False)
    entropy_coef_min: float = _refused(0.0)
    entropy_coef_max: float = _refused(1.0)
    entropy_coef_delta: float = _refused(0.005)
    entropy_target: float = _refused(0.2)
    max_tool_calling_iterations: int | None = _refused(None)
    vllm_importance_sampling_correction: bool = option(
        True,
        "With vLLM: importance weights of the learner against vLLM. Overridden by "
        "sampler_correction if set.",
    )
    vllm_importance_sampling_mode: str = option(
        "sequence_mask", "{token,sequence}_{truncate,mask}: level of the weights, and the bound."
    )
    vllm_importance_sampling_clip_max: float | None = option(
        3.0, "Weights above this are truncated or masked. Unset: no bound.", ge=0
    )
    vllm_importance_sampling_clip_min: float | None = option(
        None, "Weights below this are raised or masked. Unset: no bound.", ge=0
    )
    vllm_importance_sampling_cap: float | None = option(
        None, "Older name of vllm_importance_sampling_clip_max.", ge=0
    )
    off_policy_mask_threshold: float | None = _refused(None)

    def __post_init__(self) -> None:
        check_fields(self)
        settle_newer(self)
        apply_support(self, self.SUPPORT)
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        super().__post_init__()
        self._check_grpo()

    @property
    def length_option(self) -> str:
        """The name of ``response_length`` to use in messages."""
        return "max_completion_length"

    @property
    def loss_kl_coef(self) -> float:
        """Weight of the KL in the loss, in addition to ``kl_coef`` in the reward."""
        return self.beta

    def _check_grpo(self) -> None:
        if self.kl_estimator == "full":
            raise ConfigError(
                "kl_estimator='full' needs the whole distribution, but the KL in the loss uses only"
                " the sampled tokens; set k1, k2, k3 or abs"
            )
        if self.overlong_buffer > self.response_length:
            raise ConfigError(
                f"overlong_buffer={self.overlong_buffer} must be at most"
                f" max_completion_length={self.response_length}"
            )
        if self.loss_type == "cispo" and self.delta is not None:
            raise ConfigError(
                f"delta={self.delta} has no effect with loss_type='cispo'; leave delta unset"
            )
        if self.importance_sampling_level == "sequence" and self.loss_type != "grpo":
            logger.warning(
                "importance_sampling_level='sequence' with loss_type=%r gives long responses more"
                " weight, since the loss sums over tokens; for GSPO set loss_type='grpo'",
                self.loss_type,
            )
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            raise ConfigError(
                f"delta={self.delta} must be above 1 + epsilon_high={1 + high:g}; otherwise"
                " the clip at epsilon_high has no effect"
            )
