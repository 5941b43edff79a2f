"""Interfaces between the loop and its components, implemented structurally.

An engine, reward source or environment that can do more than its protocol requires declares that
in an attribute ``info``: an `EngineInfo`, a `RewardInfo` or an `EnvironmentInfo`.  Without
``info``, the defaults of that record apply.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from kedge.records.errors import ConfigError
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
    StepReport,
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


T = TypeVar("T")


def read_info(x: object, kind: type[T]) -> T:
    """The ``info`` of ``x``; without one, the defaults of the record ``kind``."""
    info = getattr(x, "info", None)
    if callable(info):
        raise ConfigError(
            f"{type(x).__name__}.info must be an attribute or a property that holds a"
            f" kedge.records.protocols.{kind.__name__}, got a method; decorate it with @property"
        )
    return info if isinstance(info, kind) else kind()


def check_declared(x: object, kind: type, *names: str) -> None:
    """Reject attributes that would be ignored because they belong into ``info``."""
    undeclared = [name for name in names if hasattr(x, name)]
    if undeclared and not isinstance(getattr(x, "info", None), kind):
        name, own = undeclared[0], getattr(x, "__name__", type(x).__name__)
        raise ConfigError(
            f"{own} has {name}, which is not read unless it is declared: set {own}.info ="
            f" kedge.records.protocols.{kind.__name__}({name}=...)"
        )


@runtime_checkable
class Closable(Protocol):
    """An engine, environment or reward source that holds something to release."""

    def close(self) -> Any:
        """Release resources; may be async in environments."""


class Ranks(Protocol):
    """Training processes for which rank 0 does shared work; every rank makes the same calls."""

    rank: int
    size: int

    def scatter(self, work: Callable[[], Sequence[T]]) -> T:
        """This rank's item of ``work()``, which runs on rank 0."""

    def run_on_first(self, local: Any, work: Callable[[list[Any]], Sequence[T]]) -> T:
        """This rank's item of ``work([local of every rank])``, which runs on rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a rollout engine can do beyond ``generate`` and ``load_weights``."""

    # responses that ``submit`` and ``advance`` sample at once, see `ContinuousEngine`; 0: only
    # ``generate`` is used, and batches are sampled in order
    slots: int = 0
    # ``load_weights`` may be called while it holds requests, which continue with the new weights;
    # ``Rollout.token_version`` has the version of each token
    updates_in_flight: bool = False
    max_length: int | None = None  # tokens of prompt and response together; None: no limit
    many_turns: bool = False  # ranks may need different numbers of calls for a batch
    engines: Sequence[RolloutEngine] = ()  # its parts, which sample concurrently; none: itself
    # In this context keys and values are kept for prompts that extend earlier ones.
    keep_prefixes: Callable[[], AbstractContextManager[None]] = nullcontext
    # Closes the environments that it plays in; later episodes make others.
    close_environments: Callable[[], None] = lambda: None
    # Weights are sent in this dtype (None: unchanged), through what puts them where it reads them.
    sync_dtype: torch.dtype | None = None
    stage_weights: Callable[[Iterable[tuple[str, Tensor]]], Any] | None = None
    ranks: Ranks | None = None  # that share the engine of rank 0
    more_columns: bool = False  # its rollouts have columns, for rewards, that the prompts lack
    # A rank calls it after its last ``generate`` of a batch, while others go on; None: they sample
    # independently.
    wait_for_other_ranks: Callable[[], None] | None = None


class RolloutEngine(Protocol):
    """Samples responses.

    An engine with more abilities declares them in ``info``, an `EngineInfo`, read before each run.
    """

    @property
    def shares_weights(self) -> bool:
        """True if the engine samples from the learner's own modules: no weights are copied."""

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

        Returns the version and fingerprint of the weights that the engine now has.  None is only
        allowed if it shares weights or records no log-probabilities (scripted responses).
        """


class ContinuousEngine(RolloutEngine, Protocol):
    """A rollout engine that holds many requests and samples them concurrently."""

    @property
    def info(self) -> EngineInfo:
        """With ``slots`` above 0."""

    @property
    def unfinished(self) -> int:
        """Number of incomplete responses; above 0 until all groups are returned."""

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        """Add rows: whole groups, whose ids differ from those in the engine."""

    def advance(self) -> Rollout | None:
        """Sample for a short time; returns complete groups, with their prompts as submitted."""

    def cancel(self) -> None:
        """Drop all requests."""


@dataclass(frozen=True, slots=True)
class NewContext:
    """An observation that replaces the conversation, for instance by a summary of it.

    From now on the policy only reads ``messages``, with the tools of the environment.  It remains
    one episode: later rewards count for earlier turns as well.
    """

    messages: Any  # chat messages, text or token ids, as in other observations


# Text (a user message), chat messages, or token ids; None: no message.
Observation = str | Sequence[Mapping[str, Any]] | Sequence[int] | Tensor | NewContext | None
Info = Mapping[str, Any]
Reset = tuple[Observation, Info]
Step = tuple[Observation, float, bool, bool, Info]  # reward, terminated, truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInfo:
    """Properties of an environment, read after each of its calls."""

    # JSON schemas that the chat template shows to the policy; none: the row's column ``tools``
    tools: Sequence[Mapping[str, Any]] = ()
    reads_calls: bool = False  # it reads ``Response.tool_calls``: the template must render calls
    separator: str = "\n\n"  # between the text of a prompt and that of the first observation
    # It has ``final_reward()``, which is added to the last turn of an episode that a limit ends.
    final_reward: bool = False
    grading: bool = False  # now computing the final reward: an error is the grader's
    target: Any = None  # what reward functions get of it in ``environments``; None: itself


class Environment(Protocol):
    """A multi-turn task with Gymnasium's conventions; methods may be async.

    ``info`` is an `EnvironmentInfo` if it has tools or grades cut-off episodes.
    """

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


# Waits for a reward output; the second is bool [B]: rows that failed, which are dropped whatever
# other sources say.  The other rows that are not valid are those the source does not apply to.
PendingReward = Callable[[], tuple[RewardOutput, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInfo:
    """Properties of a reward source."""

    name: str = ""  # of its scores in metrics and tables; "": that of its class
    columns: frozenset[str] | None = None  # dataset columns that it reads; None: perhaps all
    parallel: int = 1  # batches that it scores at the same time
    reads_environments: bool = False  # environments are kept until it has scored
    only_models: bool = False  # scores depend on the tokens alone
    # Starts to score and returns at once; None: ``score`` is called when the output is needed.
    begin: Callable[[Rollout], PendingReward] | None = None


class RewardSource(Protocol):
    """Scores responses; ``info``, a `RewardInfo`, is optional."""

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


class Hook:
    """Called at fixed points of training.  All methods do nothing: inherit, and override some.

    The loop calls every hook in order, on every rank.
    """

    def on_epoch_begin(self) -> None:
        """A pass over the prompts is about to begin."""

    def on_step_begin(self, step: int) -> None:
        """Iteration ``step`` (from 0) is about to begin."""

    def on_sample(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
        """The batch of iteration ``step``, before training on it."""

    def on_experience(self, step: int, experience: Experience) -> None:
        """The per-token training data of iteration ``step``."""

    def on_optimizer_step(self) -> None:
        """One optimizer step is done."""

    def on_step_end(self, report: StepReport) -> bool | None:
        """An iteration is finished; return True to stop the loop."""

    def on_epoch_end(self) -> bool | None:
        """A pass over the prompts is finished, or cut off by the end; return True to stop.

        Not called after an exception, when weights may be inconsistent.
        """

    def on_failure(self, step: int, error: Exception) -> None:
        """``error`` ends the run on all ranks; the state is that after ``step`` iterations."""


class Tracker(Protocol):
    """Destination of metrics and tables."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one row of metrics."""

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Record a table, one mapping per row, all with the same keys."""

    def close(self) -> None:
        """Flush and release."""
