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
        "Where the value model comes from: reward is the reward model, policy a head on the "
        "policy, copy a separate model with the policy's weights. auto takes the reward model if "
        "it fits; else copy in environments, and policy with an adapter, with train_layers, or "
        "for single responses.",
    )
    value_adapter: bool = option(
        False,
        "Make the value model another adapter on the policy's base model, with the same settings. "
        "It starts from reward_adapter if there is one. The policy needs an adapter, too.",
    )
    value_learning_rate: NonNegative | None = option(
        None, "The learning rate of the value model. If unset, learning_rate."
    )
    value_warmup_steps: Natural = option(
        0, "In how many iterations at the start only the value model trains."
    )
    num_value_epochs: Count = option(
        1, "Value-model passes per policy pass. Early stopping by max_kl stops both models."
    )
    freeze_value_attention: bool = option(
        False,
        "Keep the attention layers of the value model (full, linear or recurrent) as they are.",
    )


@dataclass(repr=False)
class PPOArguments(ValueArguments, CommonArguments):
    """Options of PPO."""

    SECTION: ClassVar[str] = "algorithm"

    exp_name: str = option("ppo_config", "The name of the experiment, which run_name uses.")
    # PPO.
    whiten_rewards: bool = option(
        False, "Scale rewards to unit variance without changing their mean."
    )
    scale_rewards: Literal["none", "running"] = option(
        "none",
        "With running, divide scores by the standard deviation of all scores of the run so far.",
    )
    whiten_advantages: bool = option(
        True, "Shift advantages to mean 0 and scale them down, never up, to unit variance."
    )
    cliprange: Bound = option(
        0.2, "The probability ratio is clipped to 1 - cliprange .. 1 + cliprange."
    )
    cliprange_high: Bound | None = option(
        None, "The upper bound of the clip is 1 + this, for example 0.28. If unset, cliprange."
    )
    policy_loss: Literal["clip", "mask"] = option(
        "clip",
        "With clip, tokens stop training when their advantage pushes them out of the clip range. "
        "With mask, tokens whose ratio is outside of the range do not train, whatever their "
        "advantage (SAO).",
    )
    loss_aggregation: Literal["token", "sequence", "constant"] = option(
        "token",
        "How the loss weighs tokens. token: all tokens alike. sequence: all responses alike. "
        "constant: by 1 / response_length (policy loss alone).",
    )
    mask_truncated_completions: bool = option(
        False, "Leave responses that were cut off at the length limit out of the losses."
    )
    drop_uniform_groups: bool = option(
        False,
        "With num_generations, let groups whose scores are all equal train the value model alone.",
    )
    dynamic_sampling: Natural = option(
        0, "How many rounds of new prompts may replace groups whose scores are all equal (DAPO)."
    )
    overlong_buffer: Natural = option(
        0, "Over this many tokens before response_length the score drops by up to 1 (DAPO)."
    )
    vf_coef: NonNegative = option(0.1, "The weight of the value loss.")
    cliprange_value: Bound = option(
        0.2, "How far a new value may move from the old one before its loss is clipped."
    )
    gamma: Probability = option(1.0, "The discount factor per token, or per turn with credit=turn.")
    lam: Probability = option(0.95, "The lambda of generalized advantage estimation.")
    score_position: Literal["last", "after_last"] = option(
        "last",
        "Where the score of a response is placed: on its last token, or (after_last) one slot "
        "later, with advantages scaled as in TRL.",
    )
    bootstrap_truncated: bool = option(
        False, "If the length limit cuts a response off, the value model estimates the rest."
    )
    lam_value: Probability | None = option(
        None,
        "The lambda of the value targets; 1 suits long responses. If unset, lam, or 1 with "
        "lam_alpha.",
    )
    lam_alpha: Positive | None = option(
        None, "For advantages, replace lam by 1 - 1 / (lam_alpha x tokens) (VAPO, with 0.05)."
    )
    dual_clip: Annotated[float | None, Gt(1)] = option(
        None,
        "The largest ratio of tokens with a negative advantage, for example 3. Default: no limit.",
    )
    credit: Literal["token", "turn"] = option(
        "token",
        "What gets one advantage and counts for gamma and lam: a token, or a turn of an episode.",
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

    exp_name: str = option("rloo_config", "The name of the experiment, which run_name uses.")
    num_generations: int = option(2, "How many responses are sampled for each prompt, at least 2.")
    cliprange: Bound = option(
        0.2, "The probability ratio is clipped to 1 - cliprange .. 1 + cliprange."
    )
    cliprange_high: Bound | None = option(
        None, "The upper bound of the clip is 1 + this. If unset, cliprange."
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
        False, "Charge each token with its own and later KL, not with that of the whole response."
    )
    normalize_reward: bool = option(
        False, "Scale scores to mean 0 and unit variance over the whole batch, then clip them."
    )
    reward_clip_range: Annotated[list[float] | None, Accepts(float)] = option(
        None,
        "Clip scores to low .. high, or to -c .. c if it is one number c. It acts without "
        "normalize_reward, too.",
    )
    credit: Literal["token", "turn"] = option(
        "token", "What is compared within a group: whole responses, or turn by turn."
    )
    mask_truncated_completions: bool = option(
        False, "Leave responses that were cut off at the length limit out of the loss."
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
