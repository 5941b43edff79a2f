"""The options of PPO, GRPO and RLOO with their checks, without what needs transformers or torch."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt

from kedge.config.common import CommonArguments, GroupArguments, KLEstimator
from kedge.config.declare import (
    Accepts,
    Bound,
    Count,
    Natural,
    NonNegative,
    Positive,
    Probability,
    option,
)
from kedge.records.errors import ConfigError

RECIPES: Mapping[str, Mapping[str, Any]] = {
    # Single-rollout asynchronous optimization, Hou et al. 2026 (arXiv:2607.07508); where each value
    # comes from: docs/algorithms/sao.md.
    "sao": {
        "num_generations": 1,
        "rollout_schedule": "as_completed",
        "max_lag": 1,
        "sampler_correction": "ratio",
        "policy_loss": "mask",
        "cliprange": 0.3,
        "cliprange_high": 5.0,
        "kl_coef": 0.0,
        "num_ppo_epochs": 1,
        "lam_alpha": 0.05,
        "lam_value": 1.0,
        "value_source": "copy",
        "freeze_value_attention": True,
        "num_value_epochs": 2,
        "value_warmup_steps": 10,
        "learning_rate": 1e-6,
        "value_learning_rate": 5e-6,
        "temperature": 1.0,
    },
    # What `kedge init environment` writes from 0.5B weights on; sources: docs/recipes.md.
    "agent": {
        "num_ppo_epochs": 1,
        "num_mini_batches": 4,
        "learning_rate": 1e-6,
        "value_learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "vf_coef": 1.0,
        "value_source": "copy",
        "cliprange": 0.2,
        "cliprange_high": 0.28,
        "cliprange_value": 0.5,
        "dual_clip": 3.0,
        "gamma": 1.0,
        "lam": 1.0,
        "kl_coef": 0.0,
        "temperature": 1.0,
    },
}


@dataclass(repr=False)
class ValueArguments:
    """The value model."""

    SECTION: ClassVar[str] = "value model"

    value_source: Literal["auto", "reward", "policy", "copy"] = option(
        "auto",
        "Where the value model comes from: reward (the reward model), policy (a head on the "
        "policy) or copy (a separate model with the policy's weights). auto takes the reward "
        "model if it fits; otherwise copy in environments, and policy with an adapter, with "
        "train_layers, or for single responses.",
    )
    value_adapter: bool = option(
        False,
        "Make the value model another adapter on the policy's base model, with the same settings. "
        "It starts from reward_adapter if that is set. The policy must be an adapter, too.",
    )
    value_learning_rate: NonNegative | None = option(
        None, "Learning rate of the value model. If unset, learning_rate."
    )
    value_warmup_steps: Natural = option(
        0, "Number of iterations at the start in which only the value model is trained."
    )
    num_value_epochs: Count = option(
        1, "Value-model passes per policy pass. Early stopping by max_kl stops both models."
    )
    freeze_value_attention: bool = option(
        False, "Do not train the value model's attention layers (full, linear or recurrent)."
    )


@dataclass(repr=False)
class PPOArguments(ValueArguments, CommonArguments):
    """Options of PPO."""

    SECTION: ClassVar[str] = "algorithm"

    exp_name: str = option("ppo_config", "Name of the experiment, which run_name uses by default.")
    # PPO.
    whiten_rewards: bool = option(
        False, "Scale rewards to unit variance without changing their mean."
    )
    scale_rewards: Literal["none", "running"] = option(
        "none",
        "With running, divide scores by the standard deviation of all scores in the run so far.",
    )
    whiten_advantages: bool = option(
        True, "Shift advantages to mean 0 and scale them down, never up, to unit variance."
    )
    cliprange: Bound = option(
        0.2, "Clip range: the ratio is clipped to 1 - cliprange .. 1 + cliprange."
    )
    cliprange_high: Bound | None = option(
        None, "Upper clip range: the ratio is clipped to 1 + this. If unset, cliprange."
    )
    policy_loss: Literal["clip", "mask"] = option(
        "clip",
        "With clip, a token gives no gradient if its advantage pushes its ratio further outside "
        "the clip range. With mask, a token whose ratio is outside the range gives no gradient, "
        "whatever its advantage (SAO).",
    )
    loss_aggregation: Literal["token", "sequence", "constant"] = option(
        "token",
        "How the loss weights tokens: token weights all tokens equally, sequence all responses "
        "equally, and constant each token by 1 / response_length (policy loss only).",
    )
    mask_truncated_completions: bool = option(
        False, "Leave responses that were cut off by the length limit out of the losses."
    )
    drop_uniform_groups: bool = option(
        False,
        "With num_generations, train only the value model on groups whose scores are all equal.",
    )
    dynamic_sampling: Natural = option(
        0, "Number of rounds in which new prompts replace groups whose scores are all equal (DAPO)."
    )
    overlong_buffer: Natural = option(
        0, "Over this many tokens before response_length, the score drops by up to 1 (DAPO)."
    )
    vf_coef: NonNegative = option(0.1, "Weight of the value loss.")
    cliprange_value: Bound = option(
        0.2, "How far a new value may move from the old one before its loss is clipped."
    )
    gamma: Probability = option(1.0, "Discount factor per token, or per turn with credit=turn.")
    lam: Probability = option(0.95, "Lambda of generalized advantage estimation (GAE).")
    score_position: Literal["last", "after_last"] = option(
        "last",
        "Where to place the score of a response: on its last token, or (after_last) one slot "
        "later, with advantages scaled as in TRL.",
    )
    bootstrap_truncated: bool = option(
        False, "If the length limit cuts off a response, let the value model estimate the rest."
    )
    lam_value: Probability | None = option(
        None,
        "Lambda for the value targets; 1 suits long responses. If unset, lam, or 1 with lam_alpha.",
    )
    lam_alpha: Positive | None = option(
        None, "For advantages, replace lam with 1 - 1 / (lam_alpha x tokens) (VAPO, with 0.05)."
    )
    dual_clip: Annotated[float | None, Gt(1)] = option(
        None, "Largest ratio of tokens with a negative advantage, for example 3. Default: no limit."
    )
    credit: Literal["token", "turn"] = option(
        "token",
        "Whether one action (one advantage, one step for gamma and lam) is a token or a turn.",
    )

    def _check(self) -> None:
        super()._check()
        if self.dual_clip is not None and self.policy_loss == "mask":
            raise ConfigError(
                f"dual_clip={self.dual_clip} has no effect with policy_loss='mask', which leaves"
                " out tokens with a ratio above 1 + cliprange_high; leave dual_clip unset"
            )
        high = self.cliprange if self.cliprange_high is None else self.cliprange_high
        if self.dual_clip is not None and self.dual_clip <= 1 + high:
            raise ConfigError(
                f"dual_clip={self.dual_clip} must be above 1 + the upper clip range, {1 + high:g};"
                " 3 is usual"
            )


def find_recipe(name: str) -> Mapping[str, Any]:
    """The options of a recipe."""
    if name not in RECIPES:
        raise ConfigError(f"recipe={name!r} must be one of {', '.join(map(repr, RECIPES))}")
    return RECIPES[name]


@dataclass(repr=False)
class GRPOArguments(GroupArguments, CommonArguments):
    """Options of GRPO."""

    SECTION: ClassVar[str] = "algorithm"

    exp_name: str = option("grpo_config", "Name of the experiment, which run_name uses by default.")
    learning_rate: float = option(1e-6, "Learning rate of the policy.")
    num_ppo_epochs: int = option(1, "Number of passes over each batch.")
    num_generations: int = option(8, "Number of responses sampled per prompt, at least 2.")
    response_length: int = option(512, "Maximum number of tokens in a response.")
    temperature: float = option(
        1.0, "Sampling temperature. The logits are also divided by it in training."
    )
    kl_coef: float = option(0.0, "Weight of a KL penalty (k1) in the reward, in addition to beta.")

    # GRPO.
    epsilon: Bound = option(0.2, "Lower clip range: the ratio is clipped to at least 1 - epsilon.")
    epsilon_high: Bound | None = option(
        None,
        "Upper clip range: the ratio is clipped to at most 1 + this. If unset, epsilon. With "
        "loss_type=cispo, the largest weight of a token; if unset, 5.",
    )
    delta: Annotated[float | None, Gt(1)] = option(
        None, "Upper limit of the ratio for tokens with a negative advantage. Default: no limit."
    )
    beta: NonNegative = option(
        0.0, "Weight of the KL in the loss. If it is above 0, the run needs a reference."
    )
    kl_estimator: KLEstimator = option(
        "k3", "How to estimate the KL in the loss from log-probabilities: k1, k2, k3 or abs."
    )
    use_bias_correction_kl: bool = option(
        True, "Multiply the KL in the loss by the probability ratio."
    )
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"] = option(
        "dapo",
        "How the loss averages over tokens (grpo, dr_grpo, dapo, bnpo), or cispo, which weights "
        "tokens instead of clipping them.",
    )
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group", "Divide advantages by the scores' standard deviation in the group or in the batch."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize",
        "With several rewards, normalize their weighted sum, or normalize each of them within its "
        "group before they are added up (GDPO).",
    )
    importance_sampling_level: Literal["token", "sequence"] = option(
        "token",
        "Compute the ratio per token, or (sequence, GSPO) per response as a geometric mean.",
    )
    mask_truncated_completions: bool = option(
        False, "Leave responses that were cut off by the length limit out of the loss."
    )
    credit: Literal["token", "turn"] = option(
        "token", "What is compared within a group: whole responses (token), or turn by turn."
    )
    drop_uniform_groups: bool = option(
        False, "Leave groups whose scores are all equal out of the loss."
    )
    dynamic_sampling: Natural = option(
        0, "Number of rounds in which new prompts replace groups whose scores are all equal (DAPO)."
    )
    overlong_buffer: Natural = option(
        0, "Over this many tokens before response_length, the score drops by up to 1 (DAPO)."
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


@dataclass(repr=False)
class RLOOArguments(GroupArguments, CommonArguments):
    """Options of RLOO."""

    SECTION: ClassVar[str] = "algorithm"

    exp_name: str = option("rloo_config", "Name of the experiment, which run_name uses by default.")
    num_generations: int = option(2, "Number of responses sampled per prompt, at least 2.")
    cliprange: Bound = option(
        0.2, "Clip range: the ratio is clipped to 1 - cliprange .. 1 + cliprange."
    )
    cliprange_high: Bound | None = option(
        None, "Upper clip range: the ratio is clipped to 1 + this. If unset, cliprange."
    )
    normalize_advantage: bool = option(
        False, "Scale advantages to mean 0 and unit variance over the whole batch."
    )
    ratio_level: Literal["sequence", "token"] | None = option(
        None,
        "Clip the ratio of whole responses (sequence) or of tokens. If unset, sequence, or token "
        "with token_level_kl.",
    )
    token_level_kl: bool = option(
        False, "Penalize each token for its own and later KL, not for the KL of the whole response."
    )
    normalize_reward: bool = option(
        False, "Scale scores to mean 0 and unit variance over the whole batch, then clip them."
    )
    reward_clip_range: Annotated[list[float] | None, Accepts(float)] = option(
        None,
        "Clip scores to low .. high, or to -c .. c if this is one number c. It also works without "
        "normalize_reward.",
    )
    credit: Literal["token", "turn"] = option(
        "token", "What is compared within a group: whole responses (token), or turn by turn."
    )
    mask_truncated_completions: bool = option(
        False, "Leave responses that were cut off by the length limit out of the loss."
    )

    def _check(self) -> None:
        super()._check()
        if self.token_level_kl and self.ratio_level == "sequence":
            raise ConfigError(
                "token_level_kl=True gives one advantage per token, but ratio_level='sequence'"
                " needs one per response; set ratio_level='token'"
            )
        bounds = reward_bounds(self.reward_clip_range)
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ConfigError(
                f"reward_clip_range={self.reward_clip_range!r} must be low, high with low < high,"
                " or one number above 0"
            )


def reward_bounds(value: float | Sequence[float] | None) -> tuple[float, float] | None:
    """``(low, high)`` of c, [c] or (low, high)."""
    if value is None:
        return None
    numbers = [*value] if isinstance(value, Sequence) else [value]
    if len(numbers) not in (1, 2):
        raise ConfigError(f"reward_clip_range={value!r} must be one number or low, high")
    return (-numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
