"""Options of the Trainer-style PPOTrainer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kedge.config.base import OnPolicyConfig
from kedge.config.declare import option
from kedge.suggestions import named


@named("option")
@dataclass(repr=False)
class PPOConfig(OnPolicyConfig):
    """Options of ``kedge.PPOTrainer``; ``transformers.TrainingArguments`` with those of PPO.

    Every field is listed with where it acts, or why it is refused, in
    ``kedge.config.option_status.FIELD_SUPPORT``.  ``max_steps``, ``logging_steps``, ``save_steps``,
    ``eval_steps`` and ``warmup_steps`` count updates: one batch of responses, trained on for
    ``num_ppo_epochs`` x ``num_mini_batches`` optimizer steps.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    exp_name: str = option("ppo_config", "Name of the experiment.")

    # PPO.
    whiten_rewards: bool = option(False, "Scale rewards to unit variance, keeping their mean.")
    whiten_advantages: bool = option(True, "Scale advantages to mean 0 and unit variance.")
    cliprange: float = option(
        0.2, "The probability ratio is clipped to 1 - this .. 1 + this.", gt=0, le=math.inf
    )
    vf_coef: float = option(0.1, "Weight of the value loss.", ge=0)
    cliprange_value: float = option(
        0.2, "Values are clipped to this far from their old ones.", gt=0, le=math.inf
    )
    gamma: float = option(1.0, "Discount per token.", ge=0, le=1)
    lam: float = option(0.95, "Lambda of generalized advantage estimation.", ge=0, le=1)
    score_position: Literal["last", "after_last"] = option(
        "last", "Token that gets the score: the last one, or the slot after it as in TRL."
    )
    bootstrap_truncated: bool = option(
        False, "Let the value continue responses that the length limit cut off."
    )
    lam_value: float | None = option(
        None, "Lambda of the value's targets. Unset: lam; 1 suits long responses.", ge=0, le=1
    )
    lam_alpha: float | None = option(
        None,
        "Lambda of the advantages is 1 - 1 / (this x length) instead of lam; 0.05 in VAPO.",
        gt=0,
    )
    dual_clip: float | None = option(
        None,
        "Largest ratio of a token with negative advantage, such as 3. Unset: no such limit.",
        gt=1,
    )

    # Value model.
    value_source: Literal["auto", "reward", "policy"] = option(
        "auto",
        "Where the value starts: the reward model's weights, or a head on the policy. "
        "auto: the reward model if it can be one.",
    )
    value_learning_rate: float | None = option(
        None, "Of the value model. Unset: learning_rate.", ge=0
    )
    value_warmup_steps: int = option(0, "Updates at the start that train the value alone.", ge=0)


@named("option")
@dataclass(repr=False)
class PPOv2Config(PPOConfig):
    """PPOConfig with the names that only its first version had."""

    sanity_check: bool = option(False, "A quick look: the first 100 rows of the dataset only.")
    base_model: str = option("EleutherAI/pythia-160m", "Folder or name of the tokenizer.")
