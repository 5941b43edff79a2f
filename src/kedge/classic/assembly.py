"""Builds the engine's parts from the trainer's arguments."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler
from transformers import PreTrainedTokenizerBase, TrainingArguments

from kedge.algorithms.base import Algorithm
from kedge.algorithms.ppo import ppo
from kedge.backends.hf.encoder_decoder import build_parts
from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.reference import AdapterReference, FrozenModel, Reference
from kedge.backends.hf.settings import BareArguments, LearnerSettings
from kedge.backends.hf.sharding import shards_asked
from kedge.classic.config import PPOConfig
from kedge.classic.models.reference import create_reference_model
from kedge.classic.models.wrapper import PreTrainedModelWrapper
from kedge.engine.batch_sizes import BatchSizes
from kedge.engine.early_stopping import StepLimits
from kedge.errors import ConfigError

ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "full": "full"}
_TOO_FAR = 1.5  # times target_kl


@dataclass(slots=True, kw_only=True)
class StepTrainerInputs:
    """The trainer's arguments."""

    config: PPOConfig
    model: Any
    ref_model: Any
    tokenizer: Any
    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    num_shared_layers: int | None


def check(inputs: StepTrainerInputs) -> None:
    """Validate the arguments before anything is built.

    Raises:
        ConfigError: an invalid argument; says what it must be.
    """
    if not isinstance(inputs.tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"tokenizer must be a transformers tokenizer, got {type(inputs.tokenizer).__name__}"
        )
    if not isinstance(inputs.model, PreTrainedModelWrapper):
        raise ConfigError(
            "model must be an AutoModelForCausalLMWithValueHead or "
            f"AutoModelForSeq2SeqLMWithValueHead, got {type(inputs.model).__name__}"
        )
    if inputs.ref_model is not None and not hasattr(
        _inner(inputs.ref_model), "get_output_embeddings"
    ):
        raise ConfigError(
            "ref_model must be a language model, with or without a value head, or None, got "
            f"{type(inputs.ref_model).__name__}"
        )
    if inputs.lr_scheduler is not None and not isinstance(inputs.lr_scheduler, LRScheduler):
        raise ConfigError(
            "lr_scheduler must be a torch.optim.lr_scheduler.LRScheduler of your optimizer, got "
            f"{type(inputs.lr_scheduler).__name__}"
        )
    if inputs.lr_scheduler is not None and inputs.optimizer is None:
        raise ConfigError("lr_scheduler needs the optimizer that it schedules; pass optimizer too")
    if inputs.model.is_sequential_parallel:
        raise ConfigError(
            "device_map places the model on several devices, but the learner needs it on one: "
            'load it with device_map={"": 0}, in 8 or 4 bits if it does not fit'
        )
    _check_kind(inputs)
    if inputs.ref_model is not None and inputs.num_shared_layers is not None:
        warnings.warn(
            "num_shared_layers is ignored because ref_model was given; pass only one of them",
            stacklevel=4,
        )


def _check_kind(inputs: StepTrainerInputs) -> None:
    """Check the model flags of the config against the model, and fill them in."""
    encodes = bool(getattr(inputs.model.config, "is_encoder_decoder", False))
    for name, truth in (
        ("is_encoder_decoder", encodes),
        ("is_peft_model", inputs.model.is_peft_model),
    ):
        if getattr(inputs.config, name) not in (None, truth):
            raise ConfigError(
                f"{name}={getattr(inputs.config, name)} must be {truth} for this model; remove it"
            )
        setattr(inputs.config, name, truth)


def _inner(model: Any) -> Any:
    return model.pretrained_model if isinstance(model, PreTrainedModelWrapper) else model


def make_accelerator(config: PPOConfig) -> Accelerator:
    """Device, precision, processes and trackers; also sets the global batch sizes."""
    options = config.options("accelerator_kwargs")
    options.setdefault("cpu", not torch.accelerator.is_available())
    try:
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
    if shards_asked(accelerator) != "none":
        raise ConfigError(
            "the launcher requests FSDP or DeepSpeed, but kedge.classic keeps full models on each "
            "process: launch without them, or use kedge.PPOTrainer, which supports sharding"
        )
    world = accelerator.num_processes
    config.world_size = world
    config.global_batch_size = config.batch_size * world
    config.global_backward_batch_size = (config.backward_batch_size or 0) * world
    return accelerator


def make_reference(inputs: StepTrainerInputs) -> tuple[Any, Reference]:
    """The reference model for users (None: the policy without adapter) and for the learner."""
    model, reference = inputs.model, inputs.ref_model
    if reference is None and model.is_peft_model:
        return None, AdapterReference(model.pretrained_model)
    if reference is None:
        reference = create_reference_model(model, inputs.num_shared_layers)
    return reference, FrozenModel(_inner(reference))


def make_learner(
    inputs: StepTrainerInputs, reference_model: Any, reference: Reference, accelerator: Accelerator
) -> HFLearner:
    """The learner for the model; moves both models to the accelerator's device."""
    config, model = inputs.config, inputs.model
    for part in (model, reference_model):
        if part is not None:
            part.to(accelerator.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(
            "the model has no trainable weight; load an adapter with is_trainable=True"
        )
    optimizer = inputs.optimizer or torch.optim.Adam(trained, lr=config.learning_rate)
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
        reference=reference,
        accelerator=accelerator,
        optimizers=(optimizer, inputs.lr_scheduler or ConstantLR(optimizer, 1.0, 0)),
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
        max_kl=_TOO_FAR * config.target_kl if config.early_stopping else None,
        keep_last=config.early_stopping_keeps_step,
    )
