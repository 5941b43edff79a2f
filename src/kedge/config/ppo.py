"""Options of the Trainer-style PPOTrainer."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Gt

from kedge.config.base import OnPolicyConfig
from kedge.config.declare import (
    Bound,
    Count,
    Natural,
    NonNegative,
    Positive,
    Probability,
    option,
)
from kedge.records.errors import ConfigError

Config = TypeVar("Config", bound="PPOConfig")

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
class PPOConfig(ValueArguments, OnPolicyConfig):
    """Options of ``kedge.PPOTrainer``: ``transformers.TrainingArguments`` plus those of PPO.

    ``max_steps``, ``logging_steps``, ``save_steps``, ``eval_steps`` and ``warmup_steps`` count
    iterations: one batch of responses, trained on for ``num_ppo_epochs`` x ``num_mini_batches``
    optimizer steps.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

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

    @classmethod
    def recipe(cls: type[Config], name: str, **changes: Any) -> Config:
        """The config of a set of options that were published together, with changes.

        Args:
            name: "sao", single-rollout asynchronous PPO for agents; "agent", today's PPO in
                environments (docs/recipes.md).
            changes: other options, which override those of the recipe.
        """
        return cls(**{**find_recipe(name), **changes})

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
