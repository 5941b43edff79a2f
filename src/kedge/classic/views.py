"""What programs read off a trainer between two steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kedge.backends.hf.learner import HFLearner
from kedge.classic.config import PPOConfig
from kedge.engine.updater import Updater


class Views:
    """Where a classic trainer stands."""

    config: PPOConfig
    model: Any
    learner: HFLearner
    _updater: Updater

    @property
    def kl_ctl(self) -> Any:
        """The KL controller; ``kl_ctl.value`` is the coefficient."""
        return self._updater.kl

    @kl_ctl.setter
    def kl_ctl(self, controller: Any) -> None:
        self._updater.kl = controller

    @property
    def current_step(self) -> int:
        """Calls of ``step`` so far."""
        return self._updater.step

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser."""
        return self.learner.optimizer

    @property
    def lr_scheduler(self) -> LRScheduler:
        """The learning-rate schedule; constant unless you gave one."""
        return self.learner.scheduler

    @property
    def current_device(self) -> torch.device:
        """Where the models are."""
        return self.learner.device

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the policy is an encoder-decoder."""
        return bool(self.config.is_encoder_decoder)

    @property
    def is_peft_model(self) -> bool:
        """Whether the policy is an adapter on a frozen base."""
        return bool(self.config.is_peft_model)

    def optional_peft_ctx(self) -> AbstractContextManager[Any]:
        """A ``with`` block in which an adapter is off, so that the policy is its reference."""
        if not self.is_peft_model:
            return nullcontext()
        block: AbstractContextManager[Any] = self.model.pretrained_model.disable_adapter()
        return block

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train together."""
        return self.learner.ranks > 1
