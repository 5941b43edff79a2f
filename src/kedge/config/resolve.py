"""Resolves a flat config into typed settings; code below the trainers never sees the config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kedge.config.base import OnPolicyConfig
from kedge.config.correction import CorrectionOptions, correction_options
from kedge.config.ppo import PPOConfig
from kedge.config.rollout import RolloutOptions, json_object, rollout_options
from kedge.config.sampling import sampling_of
from kedge.errors import ConfigError
from kedge.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Keyword arguments of ``engine.batch_sizes.compute_batch_sizes`` that the config sets."""

    per_device: int
    accumulation: int
    world_size: int
    num_mini_batches: int
    num_ppo_epochs: int
    num_generations: int
    total_episodes: int | None
    max_steps: int
    num_train_epochs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOOptions:
    """Keyword arguments of ``kedge.algorithms.ppo`` that the config sets."""

    gamma: float
    lam: float
    cliprange: float
    cliprange_value: float
    vf_coef: float
    kl_estimator: str
    whiten_rewards: bool
    whiten_advantages: bool
    score_position: Literal["last", "after_last"]
    bootstrap_truncated: bool
    lam_value: float | None
    lam_alpha: float | None
    dual_clip: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KLOptions:
    """Coefficient of the KL penalty: fixed, or adapted toward ``target`` nats per response."""

    coef: float
    adaptive: bool
    target: float
    horizon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOptions:
    """How scores are combined, and handling of failures and of responses without stop token.

    Args:
        weights: one per reward source, or None for 1 each.
        on_error: "raise", "score" or "drop".
        error_score: score of a failed row under "score".
        missing_stop: "keep" the score of a response without stop token, "subtract" ``penalty``
            from it, or "replace" it by ``penalty``.
        penalty: see ``missing_stop``.
        chunk: rows scored at a time.
    """

    weights: tuple[float, ...] | None
    on_error: Literal["raise", "score", "drop"]
    error_score: float | None
    missing_stop: Literal["keep", "subtract", "replace"]
    penalty: float
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """How prompts are made from the dataset."""

    max_prompt_length: int | None
    overlong: Literal["drop", "truncate"]
    shuffle: bool
    seed: int
    num_proc: int | None
    drop_unused_columns: bool
    chat_template: dict[str, Any]  # keyword arguments of the tokenizer's template


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptions:
    """Initialization and training of the value model."""

    source: Literal["auto", "reward", "policy"]
    learning_rate: float
    warmup_steps: int  # first iterations, which train only the value model


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """How the policy and the value model are trained.

    The optimizer itself comes from the config's ``optim``, ``optim_args``, ``adam_*`` and
    ``weight_decay`` through ``transformers.Trainer.get_optimizer_cls_and_kwargs``.
    """

    learning_rate: float
    weight_decay: float
    max_grad_norm: float  # inf: no clipping
    scheduler: str
    scheduler_kwargs: dict[str, Any]
    precision: Literal["no", "bf16", "fp16"]
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: dict[str, Any]
    compile: bool
    compile_backend: str | None
    compile_mode: str | None
    allow_low_precision_weights: bool
    chunk: int  # rows per forward pass without gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Completions of evaluation prompts and metrics of their scores.

    Args:
        completions: per prompt; 1 is nearly greedy, more are sampled as in training.
        success: lowest score that solves a prompt; None: accuracy is not logged.
        against_start: whether the initial policy's completions are also scored.
    """

    completions: int
    success: float | None
    against_start: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run that every algorithm has."""

    batch: BatchOptions
    sampling: Sampling
    kl: KLOptions
    reward: RewardOptions
    data: DataOptions
    value: ValueOptions
    learner: LearnerOptions
    rollout: RolloutOptions
    evaluation: EvalOptions
    seed: int
    max_lag: int
    as_completed: bool
    pieces: int | None
    correction: CorrectionOptions | None
    preflight: bool
    save_rollouts: str | None
    replay_rollouts: str | None

    @property
    def loss_kl_coef(self) -> float:
        """Weight of the KL in the loss, in addition to the one in the reward."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOSettings(RunSettings):
    """All settings of a PPO run."""

    ppo: PPOOptions


def resolve(
    config: PPOConfig, *, world_size: int | None = None, eos_token_ids: Sequence[int] = ()
) -> PPOSettings:
    """Resolve a config into typed settings.

    Args:
        config: checked again, since fields may have been set after construction.
        world_size: number of ranks; None: that of this run.
        eos_token_ids: tokens that end a response, with ``stop_token="eos"``.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """
    parts = shared_parts(config, world_size=world_size, eos_token_ids=eos_token_ids)
    _check_whitening(config, parts["batch"])
    return PPOSettings(
        **parts
        | {
            "value": ValueOptions(
                source=config.value_source,
                learning_rate=config.learning_rate
                if config.value_learning_rate is None
                else config.value_learning_rate,
                warmup_steps=config.value_warmup_steps,
            )
        },
        ppo=PPOOptions(
            gamma=config.gamma,
            lam=config.lam,
            cliprange=config.cliprange,
            cliprange_value=config.cliprange_value,
            vf_coef=config.vf_coef,
            kl_estimator=config.kl_estimator,
            whiten_rewards=config.whiten_rewards,
            whiten_advantages=config.whiten_advantages,
            score_position=config.score_position,
            bootstrap_truncated=config.bootstrap_truncated,
            lam_value=config.lam_value,
            lam_alpha=config.lam_alpha,
            dual_clip=config.dual_clip,
        ),
    )


def shared_parts(
    config: OnPolicyConfig, *, world_size: int | None, eos_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Keyword arguments of ``RunSettings``, for an algorithm without a value model.

    Args, Raises: as for ``resolve``.
    """
    config.validate()
    chunk = config.local_rollout_forward_batch_size
    rollout = rollout_options(config)
    return {
        "batch": batch_options(config, world_size),
        "sampling": sampling_of(config, eos_token_ids),
        "kl": KLOptions(
            coef=config.kl_coef,
            adaptive=config.adaptive_kl,
            target=config.kl_target,
            horizon=config.kl_horizon,
        ),
        "reward": _reward(config, chunk),
        "data": DataOptions(
            max_prompt_length=config.max_prompt_length,
            overlong=config.overlong_prompts,
            shuffle=config.shuffle_dataset,
            seed=config.seed if config.data_seed is None else config.data_seed,
            num_proc=config.dataset_num_proc,
            drop_unused_columns=config.remove_unused_columns,
            chat_template=json_object("chat_template_kwargs", config.chat_template_kwargs),
        ),
        "value": ValueOptions(source="policy", learning_rate=config.learning_rate, warmup_steps=0),
        "learner": _learner(config, chunk),
        "rollout": rollout,
        "evaluation": EvalOptions(
            completions=config.num_generations_eval or 1,
            success=config.eval_success_score,
            against_start=config.eval_against_start,
        ),
        "seed": config.seed,
        "max_lag": config.max_lag,
        "as_completed": config.rollout_schedule == "as_completed",
        "pieces": config.rollout_pieces,
        "correction": correction_options(config, rollout),
        "preflight": config.preflight,
        "save_rollouts": config.save_rollouts,
        "replay_rollouts": config.replay_rollouts,
    }


def _check_whitening(config: PPOConfig, batch: BatchOptions) -> None:
    rows = batch.per_device * batch.accumulation * batch.world_size
    for name in ("whiten_advantages", "whiten_rewards"):
        if getattr(config, name) and rows * config.response_length < 2:
            raise ConfigError(
                f"{name}=True needs a batch of at least 2 tokens, got one sample with "
                f"response_length=1, which has no variance; enlarge the batch or set {name}=False"
            )


def batch_options(config: OnPolicyConfig, world_size: int | None = None) -> BatchOptions:
    """The options that ``compute_batch_sizes`` reads."""
    return BatchOptions(
        per_device=config.per_device_train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        world_size=world_size or config.world_size or 1,
        num_mini_batches=config.num_mini_batches,
        num_ppo_epochs=config.num_ppo_epochs,
        num_generations=config.num_generations,
        total_episodes=config.total_episodes,
        max_steps=config.max_steps,
        num_train_epochs=config.num_train_epochs,
    )


def _reward(config: OnPolicyConfig, chunk: int) -> RewardOptions:
    missing: Literal["keep", "subtract", "replace"] = "keep"
    penalty = 0.0
    if config.non_eos_penalty:
        missing, penalty = "replace", config.penalty_reward_value
    elif config.missing_eos_penalty is not None:
        missing, penalty = "subtract", config.missing_eos_penalty
    return RewardOptions(
        weights=None if config.reward_weights is None else tuple(config.reward_weights),
        on_error=config.on_reward_error,
        error_score=config.reward_error_score,
        missing_stop=missing,
        penalty=penalty,
        chunk=chunk,
    )


def _learner(config: OnPolicyConfig, chunk: int) -> LearnerOptions:
    checkpointing = config.gradient_checkpointing_kwargs
    schedule = config.lr_scheduler_kwargs
    return LearnerOptions(
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm or math.inf,
        scheduler=str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type)),
        scheduler_kwargs=dict(schedule) if isinstance(schedule, dict) else {},
        precision="bf16" if config.bf16 else "fp16" if config.fp16 else "no",
        gradient_checkpointing=bool(config.gradient_checkpointing),
        gradient_checkpointing_kwargs=dict(checkpointing)
        if isinstance(checkpointing, dict)
        else {},
        compile=config.torch_compile,
        compile_backend=config.torch_compile_backend,
        compile_mode=config.torch_compile_mode,
        allow_low_precision_weights=config.allow_low_precision_weights,
        chunk=chunk,
    )
