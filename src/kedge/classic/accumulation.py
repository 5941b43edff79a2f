"""Accumulates gradients of mini-batches into one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.backends.hf.learner import HFLearner
from kedge.engine.early_stopping import KL, RATIO, StepLimits
from kedge.errors import ConfigError


@dataclass(slots=True)
class GradientAccumulator:
    """Sums the gradients of ``parts`` mini-batches on each rank, then takes the optimizer step.

    The gradient is the mean over mini-batches and ranks; with ``weighted`` losses, each is
    weighted by its trained tokens, so that it is the mean over the tokens of the optimizer step.
    """

    learner: HFLearner
    parts: int = 1
    last: bool = True  # the next mini-batch is the last of its optimizer step
    _tokens: Tensor | None = None  # trained tokens of a mini-batch, mean over parts and ranks
    _sums: Tensor | None = None  # float64 [3]: ratios, policy KL and tokens so far

    @contextmanager
    def optimizer_step(self, masks: list[Tensor]) -> Iterator[None]:
        """Context in which mini-batches with these masks [b, T] form one optimizer step."""
        self.parts = len(masks)
        self._tokens = self._mean(torch.stack([m.sum() for m in masks]).sum()) / self.parts
        self._sums = None
        try:
            yield
        finally:
            self.parts, self.last, self._tokens, self._sums = 1, True, None, None

    def _mean(self, x: Tensor) -> Tensor:
        return self.learner.total(x.float()) / self.learner.world_size

    def backward(
        self, loss: Tensor, mask: Tensor, log_ratio: Tensor, *, weighted: bool = True
    ) -> None:
        """Add the gradient of a mini-batch's mean loss; ``log_ratio`` [b, T]: new to old policy.

        Raises:
            ConfigError: the loss does not require grad.
        """
        if not loss.requires_grad:
            raise ConfigError(
                "loss() must return tensors with gradient; compute them from logprobs and vpreds"
            )
        if self._sums is None:
            self.learner.optimizer.zero_grad(set_to_none=True)
            self._sums = torch.zeros(3, dtype=torch.float64)
        count = mask.sum().float()
        mean_tokens = self._mean(count) if self._tokens is None else self._tokens
        weight = count / mean_tokens.clamp(min=1) if weighted else torch.ones_like(count)
        self.learner.scaler.scale(loss * weight / (self.parts * self.learner.world_size)).backward()
        off = torch.where(mask.bool(), log_ratio.detach(), 0.0).double()
        ratios = torch.where(mask.bool(), off.exp(), 0.0).sum()
        self._sums += torch.stack([ratios, -off.sum(), count.double()]).cpu()

    def take(self, step_limits: StepLimits) -> None:
        """Take the optimizer step, subject to ``step_limits``."""
        if self._sums is None:
            return
        ratios, kl, count = self.learner.total(self._sums).tolist()
        if step_limits.should_apply({RATIO: ratios / max(count, 1), KL: kl / max(count, 1)}):
            self.learner._take_step()
        self.learner.optimizer.zero_grad(set_to_none=True)
        self._sums = None
