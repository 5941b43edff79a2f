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
        "Initialization of the value model: the reward model, a head on the policy (policy), or a "
        "separate model with the policy's weights (copy). auto: the reward model if it fits; else "
        "copy in environments, policy with an adapter, train_layers or single responses.",
    )
    value_adapter: bool = option(
        False,
        "With an adapter on the policy: the value model is another adapter on the same base, with "
        "the same settings, or starts from reward_adapter (value_source).",
    )
    value_learning_rate: NonNegative | None = option(
        None, "Learning rate of the value model. Unset: learning_rate."
    )
    value_warmup_steps: Natural = option(0, "First iterations that train only the value model.")
    num_value_epochs: Count = option(
        1, "Passes of the value model over the batch for each pass of the policy; max_kl ends both."
    )
    freeze_value_attention: bool = option(
        False, "Train the value model without its attention layers (full, linear or recurrent)."
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

    exp_name: str = option("ppo_config", "Name of the experiment.")
    # PPO.
    whiten_rewards: bool = option(False, "Scale rewards to unit variance, keeping their mean.")
    scale_rewards: Literal["none", "running"] = option(
        "none", "Divide scores by the standard deviation of all scores so far in the run."
    )
    whiten_advantages: bool = option(True, "Scale advantages to mean 0 and at most unit variance.")
    cliprange: Bound = option(
        0.2, "Clip range of the probability ratio: 1 - cliprange to 1 + cliprange."
    )
    cliprange_high: Bound | None = option(
        None, "Clip range above 1, such as 0.28. Unset: cliprange."
    )
    policy_loss: Literal["clip", "mask"] = option(
        "clip",
        "Clip the ratio, or mask: leave out tokens whose ratio is outside of both clips, as SAO.",
    )
    loss_aggregation: Literal["token", "sequence", "constant"] = option(
        "token",
        "Weight of a token: equal, equal per response, or 1 / response_length (policy loss alone).",
    )
    mask_truncated_completions: bool = option(
        False, "Exclude responses that were truncated at the length limit from the losses."
    )
    drop_uniform_groups: bool = option(
        False, "With num_generations: groups with equal scores train the value model alone."
    )
    dynamic_sampling: Natural = option(
        0, "Most rounds of replacing groups with equal scores by new prompts (DAPO)."
    )
    overlong_buffer: Natural = option(
        0, "Tokens before response_length over which the score drops by up to 1 (DAPO)."
    )
    vf_coef: NonNegative = option(0.1, "Weight of the value loss.")
    cliprange_value: Bound = option(0.2, "Clip range of new values around the old ones.")
    gamma: Probability = option(1.0, "Discount factor per token.")
    lam: Probability = option(0.95, "Lambda of generalized advantage estimation.")
    score_position: Literal["last", "after_last"] = option(
        "last", "Position of the score: the last token, or the slot after it, whitened as in TRL."
    )
    bootstrap_truncated: bool = option(
        False, "Bootstrap from the value where the length limit truncated a response."
    )
    lam_value: Probability | None = option(
        None,
        "Lambda of the value targets. Unset: lam, or 1 with lam_alpha; 1 suits long responses.",
    )
    lam_alpha: Positive | None = option(
        None, "Replace lam for the advantages by 1 - 1 / (lam_alpha x tokens); 0.05 in VAPO."
    )
    dual_clip: Annotated[float | None, Gt(1)] = option(
        None, "Largest ratio of tokens with negative advantage, such as 3. Unset: no limit."
    )
    credit: Literal["token", "turn"] = option(
        "token", "What gets one advantage and counts for gamma and lam: a token, or a turn."
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
                f"dual_clip={self.dual_clip} must be above 1 + cliprange={1 + high:g}; 3 is usual"
            )


def find_recipe(name: str) -> Mapping[str, Any]:
    """The options of a recipe."""
    if name not in RECIPES:
        raise ConfigError(f"recipe={name!r} must be one of {', '.join(map(repr, RECIPES))}")
    return RECIPES[name]
