"""Builds the engine's parts from the trainer's arguments."""

from __future__ import annotations

import os
import warnings
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler
from transformers import PreTrainedTokenizerBase, TrainingArguments

from kedge.algorithms.base import Algorithm
from kedge.algorithms.ppo import ppo
from kedge.backends.hf.distributed import avoid_cudnn_attention
from kedge.backends.hf.encoder_decoder import build_parts
from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.reference import AdapterReference, FrozenModel, Reference
from kedge.backends.hf.settings import BareArguments, LearnerSettings
from kedge.backends.hf.sharding import sharding_strategy
from kedge.classic.config import PPOConfig
from kedge.classic.models.reference import create_reference_model
from kedge.classic.models.wrapper import PreTrainedModelWrapper
from kedge.engine.batch_sizes import BatchSizes
from kedge.engine.early_stopping import StepLimits
from kedge.errors import ConfigError

ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "full": "full"}


def check_arguments(
    config: PPOConfig,
    model: Any,
    ref_model: Any,
    tokenizer: Any,
    optimizer: Optimizer | None,
    lr_scheduler: LRScheduler | None,
    num_shared_layers: int | None,
) -> None:
    """Validate the trainer's arguments before anything is built; fill in the model flags.

    Raises:
        ConfigError: an invalid argument; says what it must be.
    """
    if not isinstance(config, PPOConfig):
        raise ConfigError(f"config must be a kedge.classic.PPOConfig, got {type(config).__name__}")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}"
        )
    if not isinstance(model, PreTrainedModelWrapper):
        raise ConfigError(
            "model must be an AutoModelForCausalLMWithValueHead or "
            f"AutoModelForSeq2SeqLMWithValueHead, got {type(model).__name__}"
        )
    check_reference(ref_model)
    check_scheduler(lr_scheduler)
    if lr_scheduler is not None and optimizer is None:
        raise ConfigError("lr_scheduler needs the optimizer that it schedules; pass optimizer too")
    if model.is_sequential_parallel:
        raise ConfigError(
            "device_map places the model on several devices, but the learner needs it on one: "
            'load it with device_map={"": 0}, in 8 or 4 bits if it does not fit'
        )
    encodes = bool(getattr(model.config, "is_encoder_decoder", False))
    for name, truth in {
        "is_encoder_decoder": encodes,
        "is_peft_model": model.is_peft_model,
    }.items():
        if getattr(config, name) not in (None, truth):
            raise ConfigError(
                f"{name}={getattr(config, name)} must be {truth} for this model; remove it"
            )
        setattr(config, name, truth)
    if ref_model is not None and num_shared_layers is not None:
        warnings.warn(
            "num_shared_layers is ignored because ref_model was given; pass only one of them",
            stacklevel=4,
        )


def check_reference(model: Any) -> None:
    """Reject what cannot be a reference; None is the policy without its adapter."""
    if model is not None and not hasattr(inner_model(model), "get_output_embeddings"):
        raise ConfigError(
            "ref_model must be a language model, with or without a value head, or None, got "
            f"{type(model).__name__}"
        )


def check_scheduler(scheduler: Any) -> None:
    """Reject what is not a learning-rate schedule; None is a constant rate."""
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            "lr_scheduler must be a torch.optim.lr_scheduler.LRScheduler, got "
            f"{type(scheduler).__name__}"
        )


def inner_model(model: Any) -> Any:
    """The transformers model of a model with a value head."""
    return model.pretrained_model if isinstance(model, PreTrainedModelWrapper) else model


def make_accelerator(config: PPOConfig) -> Accelerator:
    """Device, precision, processes and trackers; also sets the global batch sizes."""
    options = config.options("accelerator_kwargs")
    options.setdefault("cpu", not torch.accelerator.is_available())
    try:
        avoid_cudnn_attention()
        accelerator = Accelerator(
            log_with=config.log_with,
            project_config=ProjectConfiguration(**config.options("project_kwargs")),
            **options,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"accelerator_kwargs={config.options('accelerator_kwargs')!r} or project_kwargs="
            f"{config.options('project_kwargs')!r} was rejected by accelerate: {error}"
        ) from error
    asked = options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if accelerator.mixed_precision != str(asked).lower():
        warnings.warn(
            f"an earlier trainer or Accelerator of this process has mixed_precision="
            f"{accelerator.mixed_precision!r}, which accelerate gives to this trainer, too; to "
            f"train with {asked!r}, start a new process",
            stacklevel=4,
        )
    if sharding_strategy(accelerator) != "none":
        raise ConfigError(
            "the launcher requests FSDP or DeepSpeed, but kedge.classic keeps full models on each "
            "process: launch without them, or use kedge.PPOTrainer, which supports sharding"
        )
    world = accelerator.num_processes
    config.world_size = world
    config.global_batch_size = config.batch_size * world
    config.global_backward_batch_size = (config.backward_batch_size or 0) * world
    return accelerator


def make_reference(model: Any, ref_model: Any, num_shared_layers: int | None) -> Any:
    """The reference model; None for an adapter, whose base is the reference."""
    if ref_model is not None or model.is_peft_model:
        return ref_model
    return create_reference_model(model, num_shared_layers)


def frozen_reference(model: Any, ref_model: Any, device: torch.device) -> Reference:
    """The learner's form of a reference, on its device."""
    if ref_model is None:
        return AdapterReference(model.pretrained_model)
    ref_model.to(device)
    return FrozenModel(inner_model(ref_model))


def make_learner(
    config: PPOConfig,
    model: Any,
    ref_model: Any,
    accelerator: Accelerator,
    optimizer: Optimizer | None,
    lr_scheduler: LRScheduler | None,
) -> HFLearner:
    """The learner for the model; moves both models to the accelerator's device."""
    model.to(accelerator.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(
            "the model has no trainable weight; load an adapter with is_trainable=True"
        )
    optimizer = optimizer or torch.optim.Adam(trained, lr=config.learning_rate)
    return HFLearner(
        model.pretrained_model,
        cast(TrainingArguments, BareArguments()),  # optimizer and schedule are given
        LearnerSettings(
            total_iterations=config.total_ppo_epochs,
            max_grad_norm=config.max_grad_norm or 0.0,
            forward_rows=config.mini_batch_size,
            gradient_checkpointing=config.gradient_checkpointing,
        ),
        value=model.v_head,
        reference=frozen_reference(model, ref_model, accelerator.device),
        accelerator=accelerator,
        optimizers=(optimizer, lr_scheduler or ConstantLR(optimizer, 1.0, 0)),
        parts=build_parts(model.pretrained_model),
    )


def make_algorithm(config: PPOConfig) -> Algorithm:
    """PPO with the classic options."""
    return ppo(
        gamma=config.gamma,
        lam=config.lam,
        cliprange=config.cliprange,
        cliprange_value=config.cliprange_value,
        vf_coef=config.vf_coef,
        kl_estimator=ESTIMATORS[config.kl_penalty],
        whiten_rewards=config.whiten_rewards,
    )


def make_batch_sizes(config: PPOConfig) -> BatchSizes:
    """The batch sizes for the engine."""
    return BatchSizes(
        world_size=config.world_size or 1,
        micro_rows=config.mini_batch_size,
        local_rows=config.batch_size,
        minibatches=config.batch_size // (config.backward_batch_size or config.batch_size),
        epochs=config.ppo_epochs,
        group=1,
        iterations=config.total_ppo_epochs,
    )


def make_step_limits(config: PPOConfig) -> StepLimits:
    """Limits that skip optimizer steps."""
    return StepLimits(
        max_ratio=config.ratio_threshold,
        max_kl=1.5 * config.target_kl if config.early_stopping else None,
        keep_last=config.early_stopping_keeps_step,
    )
