"""Builds the engine's parts from the trainer's arguments."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler
from transformers import PreTrainedTokenizerBase

from kedge.ext.trl.classic.config import PPOConfig
from kedge.ext.trl.classic.models import PreTrainedModelWrapper, build_parts
from kedge.learner.distributed import avoid_cudnn_attention, sharding_strategy
from kedge.learner.learner import HFLearner
from kedge.learner.reference import AdapterReference, FrozenModel, Reference
from kedge.learner.settings import LearnerSettings
from kedge.records.errors import ConfigError

SCHEDULER = "a torch.optim.lr_scheduler.LRScheduler or None"


def check_arguments(
    config: PPOConfig,
    model: Any,
    ref_model: Any,
    tokenizer: Any,
    optimizer: Optimizer | None,
    lr_scheduler: LRScheduler | None,
    num_shared_layers: int | None,
) -> None:
    """Validate the trainer's arguments before anything is built; fill in the model flags."""
    heads = "an AutoModelForCausalLMWithValueHead or AutoModelForSeq2SeqLMWithValueHead"
    check_kind("config", config, PPOConfig, "a kedge.classic.PPOConfig")
    check_kind("tokenizer", tokenizer, PreTrainedTokenizerBase, "a transformers tokenizer")
    check_kind("model", model, PreTrainedModelWrapper, heads)
    check_reference(ref_model)
    check_kind("lr_scheduler", lr_scheduler, LRScheduler | None, SCHEDULER)
    if lr_scheduler is not None and optimizer is None:
        raise ConfigError("lr_scheduler needs the optimizer that it schedules; pass optimizer too")
    if model.is_sequential_parallel:
        raise ConfigError(
            "device_map places the model on several devices, but the learner needs it on one: "
            'load it with device_map={"": 0}, in 8 or 4 bits if it does not fit'
        )
    encodes = bool(getattr(model.config, "is_encoder_decoder", False))
    facts = {"is_encoder_decoder": encodes, "is_peft_model": model.is_peft_model}
    for name, truth in facts.items():
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
    """Reject an invalid reference; None is the policy without its adapter."""
    if model is not None and not hasattr(inner_model(model), "get_output_embeddings"):
        raise ConfigError(
            "ref_model must be a language model, with or without a value head, or None, got "
            f"{type(model).__name__}"
        )


def check_kind(name: str, value: Any, kind: Any, what: str) -> None:
    """Reject an argument that is not a ``kind``; ``what`` names that type in the message."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {what}, got {type(value).__name__}")


def inner_model(model: Any) -> Any:
    """The transformers model of a model with a value head."""
    return model.pretrained_model if isinstance(model, PreTrainedModelWrapper) else model


def make_accelerator(config: PPOConfig) -> Accelerator:
    """Build the accelerator and start its trackers.  Sets global batch sizes."""
    options = config.options("accelerator_kwargs")
    options.setdefault("cpu", not torch.accelerator.is_available())
    folders = config.options("project_kwargs")
    if not folders.get("logging_dir") and not folders.get("project_dir"):
        folders["logging_dir"] = "runs"  # TensorBoard needs a folder
    try:
        avoid_cudnn_attention()
        accelerator = Accelerator(
            log_with=config.log_with, project_config=ProjectConfiguration(**folders), **options
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"accelerator_kwargs={config.options('accelerator_kwargs')!r} or project_kwargs="
            f"{folders!r} was rejected by accelerate: {error}"
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
    if config.log_with is not None:
        flat = {
            name: x if isinstance(x, bool | int | float | str) else str(x)
            for name, x in config.to_dict().items()
        }
        accelerator.init_trackers(
            config.tracker_project_name, config=flat, init_kwargs=config.options("tracker_kwargs")
        )
    return accelerator


def frozen_reference(model: Any, ref_model: Any, device: torch.device) -> Reference:
    """The learner's form of a reference, on its device."""
    if ref_model is None:
        return AdapterReference(model.pretrained_model, build_parts=build_parts)
    ref_model.to(device)
    return FrozenModel(inner_model(ref_model), build_parts)


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
    trained = [p for p in model.parameters() if p.requires_grad] or model.parameters()
    optimizer = optimizer or torch.optim.Adam(trained, lr=config.learning_rate)
    # Optimizer, schedule and accelerator are given; these are the learner's other options.
    args: Any = SimpleNamespace(torch_compile=False, ddp_bucket_cap_mb=None)
    return HFLearner(
        model.pretrained_model,
        args,
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
