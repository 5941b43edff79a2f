"""From what the trainer is given to the core's parts."""

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


def check(given: StepTrainerInputs) -> None:
    """Refuse what cannot work before anything is built.

    Raises:
        ConfigError: names the argument and what it must be.
    """
    if not isinstance(given.tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"tokenizer is a {type(given.tokenizer).__name__}; pass a transformers tokenizer"
        )
    if not isinstance(given.model, PreTrainedModelWrapper):
        raise ConfigError(
            f"model is a {type(given.model).__name__}; pass an AutoModelForCausalLMWithValueHead "
            "or AutoModelForSeq2SeqLMWithValueHead"
        )
    if given.ref_model is not None and not hasattr(
        _inner(given.ref_model), "get_output_embeddings"
    ):
        raise ConfigError(
            f"ref_model is a {type(given.ref_model).__name__}; pass a language model, with or "
            "without a value head, or None"
        )
    if given.lr_scheduler is not None and not isinstance(given.lr_scheduler, LRScheduler):
        raise ConfigError(
            f"lr_scheduler is a {type(given.lr_scheduler).__name__}; pass a "
            "torch.optim.lr_scheduler.LRScheduler of your optimizer"
        )
    if given.lr_scheduler is not None and given.optimizer is None:
        raise ConfigError("lr_scheduler was given without the optimizer that it schedules")
    if given.model.is_sequential_parallel:
        raise ConfigError(
            "device_map spreads the model over several devices, but the learner keeps it on one: "
            'load it with device_map={"": 0}, in 8 or 4 bits if it does not fit'
        )
    _check_kind(given)
    if given.ref_model is not None and given.num_shared_layers is not None:
        warnings.warn(
            "num_shared_layers is ignored, for ref_model was given; pass one of the two",
            stacklevel=4,
        )


def _check_kind(given: StepTrainerInputs) -> None:
    """Compare what the config says of the model with the model, and fill it in."""
    encodes = bool(getattr(given.model.config, "is_encoder_decoder", False))
    for name, truth in (
        ("is_encoder_decoder", encodes),
        ("is_peft_model", given.model.is_peft_model),
    ):
        if getattr(given.config, name) not in (None, truth):
            raise ConfigError(
                f"{name}={getattr(given.config, name)}, but of the model it is {truth}"
            )
        setattr(given.config, name, truth)


def _inner(model: Any) -> Any:
    return model.pretrained_model if isinstance(model, PreTrainedModelWrapper) else model


def make_accelerator(config: PPOConfig) -> Accelerator:
    """Device, precision, processes and trackers; also fills in the sizes over all processes."""
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
            f"{config.options('project_kwargs')!r} is not what accelerate takes: {error}"
        ) from error
    if shards_asked(accelerator) != "none":
        raise ConfigError(
            "the launcher asks for FSDP or DeepSpeed, but kedge.classic keeps whole models on each "
            "process: launch it without, or use kedge.PPOTrainer, which shards"
        )
    world = accelerator.num_processes
    config.world_size = world
    config.global_batch_size = config.batch_size * world
    config.global_backward_batch_size = (config.backward_batch_size or 0) * world
    return accelerator


def make_reference(given: StepTrainerInputs) -> tuple[Any, Reference]:
    """The reference as the user sees it (None: the policy without adapter) and as the core does."""
    model, reference = given.model, given.ref_model
    if reference is None and model.is_peft_model:
        return None, AdapterReference(model.pretrained_model)
    if reference is None:
        reference = create_reference_model(model, given.num_shared_layers)
    return reference, FrozenModel(_inner(reference))


def make_learner(
    given: StepTrainerInputs, reference_model: Any, reference: Reference, accelerator: Accelerator
) -> HFLearner:
    """The core's learner around the model; both models go to the accelerator's device."""
    config, model = given.config, given.model
    for each in (model, reference_model):
        if each is not None:
            each.to(accelerator.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(
            "no weight of the model has requires_grad=True; load an adapter with is_trainable=True"
        )
    optimizer = given.optimizer or torch.optim.Adam(trained, lr=config.learning_rate)
    return HFLearner(
        model.pretrained_model,
        cast(TrainingArguments, BareArguments()),  # optimizer and schedule are given
        LearnerSettings(
            total_updates=config.total_ppo_epochs,
            max_grad_norm=config.max_grad_norm or 0.0,
            forward_rows=config.mini_batch_size,
            gradient_checkpointing=config.gradient_checkpointing,
        ),
        value=model.v_head,
        reference=reference,
        accelerator=accelerator,
        optimizers=(optimizer, given.lr_scheduler or ConstantLR(optimizer, 1.0, 0)),
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
    """The core's sizes."""
    return BatchSizes(
        world_size=config.world_size or 1,
        micro_rows=config.mini_batch_size,
        local_rows=config.batch_size,
        minibatches=config.batch_size // (config.backward_batch_size or config.batch_size),
        epochs=config.ppo_epochs,
        group=1,
        updates=config.total_ppo_epochs,
    )


def make_step_limits(config: PPOConfig) -> StepLimits:
    """When optimizer steps are left out."""
    return StepLimits(
        max_ratio=config.ratio_threshold,
        max_kl=_TOO_FAR * config.target_kl if config.early_stopping else None,
        keep_last=config.early_stopping_keeps_step,
    )
