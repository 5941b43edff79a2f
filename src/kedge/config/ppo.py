"""Options of the Trainer-style PPOTrainer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kedge.config.base import OnPolicyConfig
from kedge.config.declare import option
from kedge.errors import ConfigError

_ppo = partial(option, acts_in="algorithm: kedge.algorithms.ppo", resume=True)
_value = partial(option, acts_in="value model", resume=True)


@dataclass(repr=False)
class PPOConfig(OnPolicyConfig):
    """Options of ``kedge.PPOTrainer``: ``transformers.TrainingArguments`` plus those of PPO.

    ``max_steps``, ``logging_steps``, ``save_steps``, ``eval_steps`` and ``warmup_steps`` count
    iterations: one batch of responses, trained on for ``num_ppo_epochs`` x ``num_mini_batches``
    optimizer steps.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    exp_name: str = option("ppo_config", "Name of the experiment.")

    # PPO.
    whiten_rewards: bool = _ppo(False, "Scale rewards to unit variance, keeping their mean.")
    whiten_advantages: bool = _ppo(True, "Scale advantages to mean 0 and at most unit variance.")
    cliprange: float = _ppo(
        0.2,
        "Clip range of the probability ratio: 1 - cliprange to 1 + cliprange.",
        gt=0,
        le=math.inf,
    )
    vf_coef: float = _ppo(0.1, "Weight of the value loss.", ge=0)
    cliprange_value: float = _ppo(
        0.2, "Clip range of new values around the old ones.", gt=0, le=math.inf
    )
    gamma: float = _ppo(1.0, "Discount factor per token.", ge=0, le=1)
    lam: float = _ppo(0.95, "Lambda of generalized advantage estimation.", ge=0, le=1)
    score_position: Literal["last", "after_last"] = _ppo(
        "last", "Position of the score: the last token, or the slot after it, whitened as in TRL."
    )
    bootstrap_truncated: bool = _ppo(
        False, "Bootstrap from the value where the length limit truncated a response."
    )
    lam_value: float | None = _ppo(
        None,
        "Lambda of the value targets. Unset: lam, or 1 with lam_alpha; 1 suits long responses.",
        ge=0,
        le=1,
    )
    lam_alpha: float | None = _ppo(
        None, "Replace lam for the advantages by 1 - 1 / (lam_alpha x tokens); 0.05 in VAPO.", gt=0
    )
    dual_clip: float | None = _ppo(
        None, "Largest ratio of tokens with negative advantage, such as 3. Unset: no limit.", gt=1
    )
    credit: Literal["token", "turn"] = _ppo(
        "token", "What gets one advantage and counts for gamma and lam: a token, or a turn."
    )

    # Value model.
    value_source: Literal["auto", "reward", "policy"] = _value(
        "auto",
        "Initialization of the value model: the reward model, or the policy with a new head. "
        "auto: the reward model if it fits.",
    )
    value_adapter: bool = _value(
        False,
        "With an adapter on the policy: the value model is another adapter on the same base, with "
        "the same settings, or starts from reward_adapter (value_source).",
    )
    value_learning_rate: float | None = _value(
        None, "Learning rate of the value model. Unset: learning_rate.", ge=0
    )
    value_warmup_steps: int = _value(0, "First iterations that train only the value model.", ge=0)

    def _check(self) -> None:
        super()._check()
        if self.dual_clip is not None and self.dual_clip <= 1 + self.cliprange:
            raise ConfigError(
                f"dual_clip={self.dual_clip} must be above 1 + cliprange={1 + self.cliprange:g};"
                " 3 is usual"
            )


@dataclass(repr=False)
class PPOv2Config(PPOConfig):
    """PPOConfig with the options that only TRL's first version of it had."""

    sanity_check: bool = option(
        False,
        "Use only the first 100 rows of the dataset.",
        acts_in="command line and scripts: only the first 100 rows of the dataset",
    )
    base_model: str = option(
        "EleutherAI/pythia-160m",
        "Folder or Hub name of the tokenizer.",
        acts_in="command line and scripts: folder or Hub name of the tokenizer",
    )
