"""Options of the Trainer-style PPOTrainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kedge.config.base import OnPolicyConfig, fields_of, foreign
from kedge.config.declare import default_of, option
from kedge.records.errors import ConfigError

_ppo = partial(option, acts_in="algorithm: kedge.algorithms.ppo", resume=True)
_value = partial(option, acts_in="value model", resume=True)


RECIPES: dict[str, dict[str, Any]] = {
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
class PPOConfig(OnPolicyConfig):
    """Options of ``kedge.PPOTrainer``: ``transformers.TrainingArguments`` plus those of PPO.

    ``max_steps``, ``logging_steps``, ``save_steps``, ``eval_steps`` and ``warmup_steps`` count
    iterations: one batch of responses, trained on for ``num_ppo_epochs`` x ``num_mini_batches``
    optimizer steps.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    exp_name: str = option("ppo_config", "Name of the experiment.")
    recipe: Literal["sao", "agent"] | None = option(
        None,
        "Values for the options that are not set: sao, single-rollout asynchronous PPO for agents; "
        "agent, today's PPO in environments (docs/recipes.md).",
        acts_in="defaults of other options",
    )

    # PPO.
    whiten_rewards: bool = _ppo(False, "Scale rewards to unit variance, keeping their mean.")
    scale_rewards: Literal["none", "running"] = _ppo(
        "none", "Divide scores by the standard deviation of all scores so far in the run."
    )
    whiten_advantages: bool = _ppo(True, "Scale advantages to mean 0 and at most unit variance.")
    cliprange: float = _ppo(
        0.2,
        "Clip range of the probability ratio: 1 - cliprange to 1 + cliprange. In Python also a "
        "pair, low and high.",
        gt=0,
        le=math.inf,
        accepts=float | list[float],
    )
    cliprange_high: float | None = _ppo(
        None, "Clip range above 1, such as 0.28. Unset: cliprange.", gt=0, le=math.inf
    )
    policy_loss: Literal["clip", "mask"] = _ppo(
        "clip",
        "Clip the ratio, or mask: leave out tokens whose ratio is outside of both clips, as SAO.",
    )
    loss_aggregation: Literal["token", "sequence", "constant"] = _ppo(
        "token",
        "Weight of a token: equal, equal per response, or 1 / response_length (policy loss alone).",
    )
    kl_cov: float = _ppo(
        0.0,
        "Share of tokens, of largest covariance of log-probability and advantage, with a penalty "
        "on the change of their log-probability (KL-Cov, 0.002).",
        ge=0,
        le=1,
    )
    kl_cov_coef: float = _ppo(1.0, "Weight of the penalty of kl_cov.", ge=0)
    clip_cov: float = _ppo(
        0.0,
        "Share of tokens, of those with a covariance from 1 to 5, without policy gradient "
        "(Clip-Cov, 2e-4).",
        ge=0,
        le=1,
    )
    mask_truncated_completions: bool = _ppo(
        False, "Exclude responses that were truncated at the length limit from the losses."
    )
    drop_uniform_groups: bool = _ppo(
        False, "With num_generations: groups with equal scores train the value model alone."
    )
    dynamic_sampling: int = _ppo(
        0, "Most rounds of replacing groups with equal scores by new prompts (DAPO).", ge=0
    )
    overlong_buffer: int = _ppo(
        0, "Tokens before response_length over which the score drops by up to 1 (DAPO).", ge=0
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
    value_source: Literal["auto", "reward", "policy", "copy"] = _value(
        "auto",
        "Initialization of the value model: the reward model, a head on the policy (policy), or a "
        "separate model with the policy's weights (copy). auto: the reward model if it fits; else "
        "copy in environments, policy with an adapter, train_layers or single responses.",
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
    num_value_epochs: int = _value(
        1,
        "Passes of the value model over the batch for each pass of the policy; max_kl ends both.",
        ge=1,
    )
    freeze_value_attention: bool = _value(
        False, "Train the value model without its attention layers (full, linear or recurrent)."
    )

    @classmethod
    def convert(cls, c: Any, given: Mapping[str, Any]) -> None:
        """Fill in the values of ``recipe``."""
        own, recipe = fields_of(cls), RECIPES.get(c.recipe, {})
        names = {getattr(foreign(cls).get(name), "target", name) for name in given}
        if len(given) >= len(own):  # true if an argument parser or `replace` passed every option
            names = {name for name in own if getattr(c, name) != default_of(own[name])}
            values = [getattr(c, name) == recipe[name] for name in names & recipe.keys()]
            if 2 * sum(values) > len(recipe):
                return  # the config was copied and has the recipe's values
        if "policy_loss" in names and c.policy_loss != recipe.get("policy_loss", "clip"):
            names |= {"cliprange", "dual_clip"}  # the recipe's bounds are those of the other loss
        names |= {"cliprange_high"} if "cliprange" in names else set()
        names |= {"num_mini_batches"} if "local_mini_batch_size" in names else set()
        names |= {"rollout_schedule"} if "max_lag" in names and c.max_lag == 0 else set()
        names |= {"lam_alpha"} if "lam" in names or c.credit == "turn" else set()
        names |= {"value_source", "freeze_value_attention"} if c.value_adapter else set()
        for name, value in recipe.items():
            if name not in names:
                setattr(c, name, value)

    def _fill_defaults(self) -> None:
        super()._fill_defaults()
        if isinstance(self.cliprange, list):
            if len(self.cliprange) != 2:
                shown = ", ".join(f"{x:g}" for x in self.cliprange)
                raise ConfigError(f"cliprange=[{shown}] must be one number or low, high")
            self.cliprange, self.cliprange_high = self.cliprange

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
