"""Public properties of the classic trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.optim import check_optimizer_covers
from kedge.classic.assembly import (
    check_reference,
    check_scheduler,
    frozen_reference,
    inner_model,
)
from kedge.classic.config import PPOConfig
from kedge.engine.updater import Updater
from kedge.errors import ConfigError


def _fixed(name: str, doc: str, read: Callable[[Any], bool]) -> Any:
    """A property that programs may assign, as TRL's trainer does, but not change."""

    def assign(self: Any, value: Any) -> None:
        if value is not read(self):
            raise ConfigError(
                f"{name} is {read(self)} for this trainer and cannot be changed to {value!r}"
            )

    return property(read, assign, doc=doc)


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
        check_scheduler(scheduler)
        self.learner.scheduler = scheduler or ConstantLR(self.learner.optimizer, 1.0, 0)

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
        check_reference(model)
        if model is None and not self.is_peft_model:
            raise ConfigError("ref_model=None needs a PEFT policy; assign a model")
        if model is not None and inner_model(model) is self.model.pretrained_model:
            raise ConfigError(
                "ref_model must not be the policy itself, which changes during training; assign "
                "create_reference_model(trainer.model)"
            )
        device = self.learner.device
        self.learner.reference = frozen_reference(self.model, model, device).to(device)
        self._ref_model = model

    @property
    def model_params(self) -> list[nn.Parameter]:
        """The trainable weights."""
        return [p for p in self.model.parameters() if p.requires_grad]

    is_encoder_decoder = _fixed(
        "is_encoder_decoder",
        "Whether the policy is an encoder-decoder.",
        lambda self: bool(self.config.is_encoder_decoder),
    )
    is_peft_model = _fixed(
        "is_peft_model",
        "Whether the policy is an adapter on a frozen base.",
        lambda self: bool(self.config.is_peft_model),
    )
    is_distributed = _fixed(
        "is_distributed",
        "Whether the world size is larger than 1.",
        lambda self: self.learner.world_size > 1,
    )

    def optional_peft_ctx(self) -> AbstractContextManager[Any]:
        """A context in which the adapter is disabled, so that the policy is its reference."""
        if not self.is_peft_model:
            return nullcontext()
        block: AbstractContextManager[Any] = self.model.pretrained_model.disable_adapter()
        return block
