"""What the engine asks of the outside world.  Backends implement these; nothing inherits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from kedge.types import (
    Experience,
    Loss,
    MicroBatch,
    ModelOutputs,
    PolicyOutput,
    PromptBatch,
    Receipt,
    RewardOutput,
    Rollout,
    Sampling,
)

LossFn = Callable[[PolicyOutput, MicroBatch], Loss]
Total = Callable[[Tensor], Tensor]  # element-wise sum of a tensor over all ranks
ShouldApply = Callable[[Mapping[str, float]], bool]  # the metrics of an optimizer step -> take it


def always(metrics: Mapping[str, float]) -> bool:
    """Take every optimizer step."""
    return True


class Stateful(Protocol):
    """Something a checkpoint holds: tensors, numbers and strings in nested dicts and lists."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        ...


class PromptSource(Protocol):
    """Where prompts come from."""

    def batch(self, step: int) -> PromptBatch:
        """This rank's prompts of training step ``step``: a pure function, nothing to save."""
        ...


class RolloutEngine(Protocol):
    """Samples responses."""

    @property
    def shares_weights(self) -> bool:
        """True if it samples from the learner's own modules, so that no weights need copying."""
        ...

    @property
    def logprobs(self) -> Literal["sampled", "raw", "none"]:
        """What ``behavior_logprobs`` are of: the distribution sampled from, another, or absent."""
        ...

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row.  A row's response depends on (weights, prompt, row, seed) alone."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Sample from these weights from now on.  A live engine is told the version alone.

        None means that the engine holds no weights at all (scripted responses).
        """
        ...


class RewardSource(Protocol):
    """Scores responses."""

    def score(self, rollout: Rollout) -> RewardOutput:
        """One reward output for all rows; raises RewardError, never returns None."""
        ...


class Learner(Stateful, Protocol):
    """Holds the models that train and the optimizer."""

    version: int  # training steps (updates) finished; end_batch adds 1

    @property
    def rank(self) -> int:
        """Which of the processes that train together this is, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        ...

    def compute_logprobs(
        self, rollout: Rollout, *, values: bool, reference: bool, full_kl: bool
    ) -> ModelOutputs:
        """Log-probabilities, reference and values of a rollout, without gradient."""
        ...

    def optimizer_step(
        self,
        step: Iterable[MicroBatch],
        loss: LossFn,
        *,
        only_value: bool = False,
        should_apply: ShouldApply = always,
    ) -> dict[str, float]:
        """ONE optimizer step.  Returns the loss's metrics summed over micro-batches and ranks.

        The step is taken if ``admit`` says so of these metrics; else the gradient is dropped.
        """
        ...

    def forward_no_grad(self, rows: Experience) -> PolicyOutput:
        """The forward pass of ``update`` (train mode, autocast), without gradient or step.

        The output is on the device of ``rows``.
        """
        ...

    def advance_version(self) -> None:
        """A training step is over: the version and the learning-rate schedule move on by one."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """A copy of the policy's weights."""
        ...

    def fingerprint(self) -> str:
        """A short hash of the policy's weights: differs if any weight differs."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """Sum of ``x`` over all ranks."""
        ...

    def pool(self, mine: Experience) -> Experience:
        """The rows of all ranks, in rank order; every rank brings equally many."""
        ...


class KLController(Stateful, Protocol):
    """The coefficient of the KL penalty."""

    value: float

    def update(self, kl: float, episodes: int) -> None:
        """Adapt to the KL (nats per response) measured over ``episodes`` responses."""
        ...


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one row of metrics."""
        ...

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Record a table, one mapping per row, all with the same keys."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...
