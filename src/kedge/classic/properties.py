"""Public properties of the classic trainer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.optim import check_optimizer_covers
from kedge.backends.hf.reference import AdapterReference, FrozenModel
from kedge.classic.config import PPOConfig
from kedge.engine.updater import Updater
from kedge.errors import ConfigError


class Views:
    """State of a classic trainer as properties."""

    config: PPOConfig
    model: Any
    learner: HFLearner
    _updater: Updater
    _device: torch.device | None = None
    _ref_model: Any = None
    _accumulates = False  # train_minibatch is overridden, so the optimizer is wrapped

    @property
    def kl_ctl(self) -> Any:
        """The KL controller; ``kl_ctl.value`` is the coefficient."""
        return self._updater.kl

    @kl_ctl.setter
    def kl_ctl(self, controller: Any) -> None:
        self._updater.kl = controller

    @property
    def current_step(self) -> int:
        """Calls of ``step`` so far; the step in trackers and checkpoints."""
        return self._updater.step

    @current_step.setter
    def current_step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"current_step must be a whole number of at least 0, got {step!r}")
        self._updater.step = step

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer = self.learner.optimizer
        return AcceleratedOptimizer(optimizer, False) if self._accumulates else optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        check_optimizer_covers(optimizer, self.learner._trained())
        before, self.learner.optimizer = self.learner.optimizer, optimizer
        if isinstance(self.learner.scheduler, ConstantLR) and before is not optimizer:
            self.learner.scheduler = ConstantLR(optimizer, 1.0, 0)

    @property
    def lr_scheduler(self) -> LRScheduler:
        """The learning-rate schedule; constant by default."""
        return self.learner.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: LRScheduler | None) -> None:
        scheduler = scheduler or ConstantLR(self.learner.optimizer, 1.0, 0)
        if not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                "lr_scheduler must be a torch.optim.lr_scheduler.LRScheduler, got "
                f"{type(scheduler).__name__}"
            )
        self.learner.scheduler = scheduler

    @property
    def current_device(self) -> torch.device:
        """Device of the models and of the tensors in the steps of PPO."""
        return self._device or self.learner.device

    @current_device.setter
    def current_device(self, device: torch.device | str | int) -> None:
        chosen, here = torch.device(device), self.learner.device
        indices = {chosen.index, here.index} - {None}
        if chosen.type != here.type or len(indices) > 1:
            raise ConfigError(
                f"current_device={str(chosen)!r}, but the models are on {str(here)!r}; select the "
                "device with the launcher, or with PPOConfig(accelerator_kwargs=...)"
            )
        self._device = chosen

    @property
    def ref_model(self) -> Any:
        """The reference; None: the policy without its adapter."""
        return self._ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        inner = getattr(model, "pretrained_model", model)
        if model is None and not self.is_peft_model:
            raise ConfigError("ref_model=None needs a PEFT policy; assign a model")
        if model is not None and not hasattr(inner, "get_output_embeddings"):
            raise ConfigError(
                f"ref_model must be a language model, with or without a value head, got "
                f"{type(model).__name__}"
            )
        if inner is self.model.pretrained_model:
            raise ConfigError(
                "ref_model must not be the policy itself, which changes during training; assign "
                "create_reference_model(trainer.model)"
            )
        device = self.learner.device
        if model is None:
            reference: Any = AdapterReference(self.model.pretrained_model)
        else:
            reference = FrozenModel(inner)
            model.to(device)
        self.learner.reference = reference.to(device)
        self._ref_model = model

    @property
    def model_params(self) -> list[nn.Parameter]:
        """The trainable weights."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the policy is an encoder-decoder."""
        return bool(self.config.is_encoder_decoder)

    @is_encoder_decoder.setter
    def is_encoder_decoder(self, value: bool) -> None:
        _check_unchanged("is_encoder_decoder", value, self.is_encoder_decoder)

    @property
    def is_peft_model(self) -> bool:
        """Whether the policy is an adapter on a frozen base."""
        return bool(self.config.is_peft_model)

    @is_peft_model.setter
    def is_peft_model(self, value: bool) -> None:
        _check_unchanged("is_peft_model", value, self.is_peft_model)

    @property
    def is_distributed(self) -> bool:
        """Whether the world size is larger than 1."""
        return self.learner.world_size > 1

    @is_distributed.setter
    def is_distributed(self, value: bool) -> None:
        _check_unchanged("is_distributed", value, self.is_distributed)

    def optional_peft_ctx(self) -> AbstractContextManager[Any]:
        """A context in which the adapter is disabled, so that the policy is its reference."""
        if not self.is_peft_model:
            return nullcontext()
        block: AbstractContextManager[Any] = self.model.pretrained_model.disable_adapter()
        return block


def _check_unchanged(name: str, value: Any, truth: bool) -> None:
    if value is not truth:
        raise ConfigError(f"{name} is {truth} for this trainer and cannot be changed to {value!r}")
