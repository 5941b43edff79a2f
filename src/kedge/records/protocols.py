"""Interfaces between the loop and its components, implemented structurally."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from kedge.records.types import (
    Experience,
    Loss,
    MicroBatch,
    ModelOutputs,
    PolicyOutput,
    PromptBatch,
    Receipt,
    Response,
    RewardOutput,
    Rollout,
    Sampling,
)

LossFn = Callable[[PolicyOutput, MicroBatch], Loss]
AllReduce = Callable[[Tensor], Tensor]  # element-wise sum over all ranks
ShouldApply = Callable[
    [Mapping[str, float]], bool
]  # metrics of an optimizer step -> whether to apply it


def always(metrics: Mapping[str, float]) -> bool:
    """Apply every optimizer step."""
    return True


class Stateful(Protocol):
    """Checkpointable state: tensors, numbers and strings in nested dicts and lists."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume exactly from here."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``."""


class PromptSource(Protocol):
    """Source of prompts."""

    def batch(self, step: int) -> PromptBatch:
        """This rank's prompts of iteration ``step``; a pure function without state to save.

        Where ranks share engines as completed, ``whole()`` must return the source of all rows.
        """


class RolloutEngine(Protocol):
    """Samples responses."""

    @property
    def shares_weights(self) -> bool:
        """True if it samples from the learner's modules, so that no weights are copied."""

    @property
    def logprob_kind(self) -> Literal["sampled", "raw", "none"]:
        """Whether ``behavior_logprobs`` are of the sampling or raw distribution, or absent.

        "raw" is the model's, without temperature, truncation and ``min_new_tokens``; where these
        change it, the loop ignores them, and trainers refuse lag and corrections.
        """

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row, which depends only on (weights, prompt, row, seed)."""

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Sample with these weights from now on.  ``weights`` is empty if ``shares_weights``.

        Returns the version and the fingerprint of the weights that it has now; None only if it
        shares weights or records no log-probabilities (scripted responses).
        """


class ContinuousEngine(RolloutEngine, Protocol):
    """A rollout engine that holds many requests and samples them concurrently."""

    @property
    def slots(self) -> int:
        """Number of responses sampled at once; 0: only ``generate`` can be used."""

    @property
    def updates_in_flight(self) -> bool:
        """Whether ``load_weights`` may be called while it holds requests.

        They continue with the new weights; ``Rollout.token_version`` has the version of each token.
        """

    @property
    def unfinished(self) -> int:
        """Number of its responses that are not complete; not 0 until all groups are returned."""

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        """Add rows: whole groups, whose ids differ from those in the engine."""

    def advance(self) -> Rollout | None:
        """Sample for a short time; returns complete groups, with their prompts as submitted."""

    def cancel(self) -> None:
        """Drop all requests."""


@dataclass(frozen=True, slots=True)
class NewContext:
    """An observation that replaces the conversation, for instance by a summary of it.

    From now on the policy reads ``messages`` alone, with the tools of the environment.  The episode
    stays one: later rewards count for earlier turns as well.
    """

    messages: Any  # chat messages, text or token ids, as in other observations


# Text (a user message), chat messages, or token ids; None: no message.
Observation = str | Sequence[Mapping[str, Any]] | Sequence[int] | Tensor | NewContext | None
Info = Mapping[str, Any]
Reset = tuple[Observation, Info]
Step = tuple[Observation, float, bool, bool, Info]  # reward, terminated, truncated


class Environment(Protocol):
    """A task of many turns, by the convention of Gymnasium; methods may be async."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset | Awaitable[Reset]:
        """Begin an episode, which depends only on the arguments.

        Args:
            seed: seed of all randomness in the episode.
            options: the dataset columns of the prompt's row.

        Returns:
            The first observation, which follows the prompt, and information.  Numbers under
            ``info["metrics"]`` are summed over an episode and logged as ``environment/NAME``;
            other numbers in it are logged as they are at the end of the episode.
        """

    def step(self, response: Response) -> Step | Awaitable[Step]:
        """Take one turn of the policy.

        Returns:
            Observation, reward of the turn, whether the episode ended by itself, whether it was
            cut off, and information.
        """


class RewardSource(Protocol):
    """Scores responses."""

    def score(self, rollout: Rollout) -> RewardOutput:
        """The rewards of all rows; raises RewardError and never returns None."""


class Learner(Stateful, Protocol):
    """Holds the trained models and the optimizer."""

    version: int  # finished iterations; advance_version adds 1

    @property
    def rank(self) -> int:
        """Rank of this training process, from 0."""

    @property
    def world_size(self) -> int:
        """Number of training processes."""

    @property
    def low_precision(self) -> bool:
        """Whether models run in bf16 or fp16."""

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt of several rows of a micro-batch is computed only once."""

    def compute_logprobs(
        self, rollout: Rollout, *, values: bool, reference: bool, full_kl: bool
    ) -> ModelOutputs:
        """Policy and reference log-probabilities and values of a rollout, without gradient."""

    def optimizer_step(
        self,
        step: Iterable[MicroBatch],
        loss: LossFn,
        *,
        only_value: bool = False,
        skip_policy: bool = False,
        should_apply: ShouldApply = always,
    ) -> dict[str, float]:
        """Take ONE optimizer step.  Returns the loss metrics summed over micro-batches and ranks.

        The step is applied if ``should_apply(metrics)``; otherwise the gradient is discarded.
        """

    def forward_no_grad(self, rows: Experience, *, values: bool = True) -> PolicyOutput:
        """The forward pass of ``optimizer_step`` (train mode, autocast), without gradient or step.

        The output is on the device of ``rows``; without ``values`` it has none.
        """

    def advance_version(self) -> None:
        """End an iteration: increment the version and step the learning-rate schedule."""

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's weights; unless they are a copy, load them before training continues."""

    def fingerprint(self) -> str:
        """A short hash of the policy's weights that changes if any weight changes."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of ``x`` over all ranks."""

    def all_gather(self, local: Experience) -> Experience:
        """The rows of all ranks, in rank order; every rank passes the same number."""


class KLController(Stateful, Protocol):
    """The coefficient of the KL penalty."""

    value: float

    def update(self, kl: float, episodes: int) -> None:
        """Adapt to the KL (nats per response) measured over ``episodes`` responses."""


class Tracker(Protocol):
    """Destination of metrics and tables."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one row of metrics."""

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Record a table, one mapping per row, all with the same keys."""

    def close(self) -> None:
        """Flush and release."""
