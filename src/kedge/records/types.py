"""The records that flow through training, in the order they are created.

Axes, used in every comment below:
    B  rows, one sampled response each          P  prompt tokens, left-padded
    R  response tokens, right-padded            b  rows of one micro-batch
Booleans are True where a token is real.  Log-probabilities are natural logarithms (nats).
"""

# ruff: noqa: RUF009  (rows_field() returns dataclasses.field)

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kedge.records.base import Record, add_totals, rows_field

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters: the distribution of response tokens and the stop conditions."""

    max_new_tokens: int
    min_new_tokens: int = 0  # stop tokens are banned before this many
    temperature: float = 1.0  # logits are divided by it; 0 is greedy
    top_k: int = 0  # 0 disables
    top_p: float = 1.0  # 1 disables
    min_p: float = 0.0  # 0 disables
    stop_ids: tuple[int, ...] = ()  # the stop token stays in the response, at its end
    stop_strings: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p excludes tokens of positive probability."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def changes_logprobs(self) -> bool:
        """Whether tokens are drawn from another distribution than the model's softmax."""
        return self.temperature != 1.0 or self.truncates or self.min_new_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch(Record):
    """The prompts of one iteration, one row per response to sample."""

    ids: Tensor = rows_field(left=True)  # int64 [B, P]
    mask: Tensor = rows_field(left=True)  # bool  [B, P]
    group: Tensor  # int64 [B]; rows with equal values share a prompt
    row: Tensor  # int64 [B]; index in the global batch, which selects the row's random numbers
    # Dataset columns, one value per row.
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)
    # int64 [B]; most tokens per response, at most max_new_tokens; None: max_new_tokens
    limit: Tensor | None = None

    def limits(self, sampling: Sampling) -> Tensor:
        """Maximum tokens of each response, int64 [B]."""
        limit = torch.full_like(self.row, sampling.max_new_tokens)
        return limit if self.limit is None else limit.minimum(self.limit)


def group_rows(prompts: PromptBatch) -> tuple[list[int], Sequence[Tensor]]:
    """Group ids in ascending order, and the rows of each, int64 [n]."""
    ids, group, counts = prompts.group.unique(return_inverse=True, return_counts=True)
    return ids.tolist(), group.argsort(stable=True).split(counts.tolist())


def number_prompts(ids: Tensor, mask: Tensor) -> Tensor:
    """Number prompts int64 [B, P] (left-padded) so that equal prompts share a number int64 [B]."""
    return ids.masked_fill(~mask, -1).unique(dim=0, return_inverse=True)[1]


def with_unique_groups(batches: Sequence[PromptBatch]) -> list[PromptBatch]:
    """Renumber group ids so that no two batches share one."""
    renumbered, offset = [], 0
    for batch in batches:
        ids, group = batch.group.unique(return_inverse=True)
        renumbered.append(replace(batch, group=group + offset))
        offset += len(ids)
    return renumbered


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the policy asks for."""

    name: str  # "" if the call could not be read
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""  # what is wrong with the call, as text for the policy
    # The arguments as written, in formats that print 1 and "1" alike.
    texts: Mapping[str, str] = field(default_factory=dict)
    id: str = ""  # as an expert wrote it; results name it


@dataclass(frozen=True, slots=True)
class Response:
    """One turn of the policy, as passed to an environment."""

    text: str  # decoded, without reasoning and tokens that begin, end or fill a text
    ids: tuple[int, ...] = ()  # as sampled, with the stop token
    terminated: bool = True  # False: cut off by a token limit
    raw: str | None = None  # decoded with special tokens, without the stop token; None: the text
    parse: Callable[[str], Sequence[ToolCall]] | None = None
    reasoning: str = ""  # reasoning of the policy before the text

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The calls in the response, parsed on access; calls in the reasoning do not count."""
        text = self.text if self.raw is None else self.raw
        return () if self.parse is None else self.parse(text)


LEASES = "_leases"  # column of the finished environments, until the rewards are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes(Record):
    """Results of environments for a rollout, one episode per row."""

    # int64 [B, R]; turn number from 0 for the policy's tokens, -1 for others
    turn: Tensor = rows_field(fill=-1)
    rewards: Tensor  # float64 [B, R]; reward of each turn, at its last token
    valid: Tensor  # bool [B]; False: the environment failed, the row is not trained on
    # Per row: "observations", the chat messages between two turns; "metrics" that the environment
    # reported; "error", why it failed; "totals", all metrics as (sum, count); LEASES, the
    # environments themselves until they are scored.
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, tuple[float, float]]:
        """The metrics over all rows, as (sum, count)."""
        return add_totals(self.columns.get("totals", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout(Record):
    """Prompts and the responses sampled for them."""

    prompts: PromptBatch
    ids: Tensor  # int64 [B, R]
    # bool [B, R]; tokens that the policy sampled (including the stop token), which are trained on
    loss_mask: Tensor
    # bool [B, R]; all real tokens, a prefix of each row; loss_mask implies response_mask
    response_mask: Tensor
    terminated: Tensor  # bool [B]; ended by a stop token or string, not by a limit
    policy_version: Tensor  # int64 [B]; policy version that sampled the row, -1: unknown
    behavior_logprobs: Tensor | None = None  # float32 [B, R]; recorded during sampling
    # int64 [B, R, K]; tokens that could be sampled, -1: unused
    allowed_tokens: Tensor | None = rows_field(fill=-1, default=None)
    # for multi-turn tasks
    episodes: Episodes | None = rows_field(wide_as="ids", default=None)
    # int64 [B, R]; policy version that sampled the token, -1: the row's; ``policy_version`` is then
    # the oldest in the row
    token_version: Tensor | None = rows_field(fill=-1, absent="fill", wide_as="ids", default=None)
    # bool [B, R]; True where the model starts reading afresh: it does not attend to earlier tokens,
    # not even to the prompt
    context_start: Tensor | None = rows_field(absent="fill", wide_as="ids", default=None)

    @property
    def token_versions(self) -> Tensor:
        """Policy version of each token, int64 [B, R]; -1: unknown."""
        of_row = self.policy_version[:, None].expand_as(self.ids)
        if self.token_version is None:
            return of_row
        return self.token_version.where(self.token_version >= 0, of_row)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutput(Record):
    """The output of a reward source for each response."""

    scores: Tensor  # float32 [B]; the whole reward of the response
    valid: Tensor  # bool [B]; False: not scored, excluded from training
    components: Mapping[str, Tensor] = field(default_factory=dict)  # float32 [B], NaN: n/a
    # float64 [B, R]; added to the score at the last token, from which they move parts of it to
    # earlier tokens; those of a trainer's mixture sum to 0, a source's own need not
    token_rewards: Tensor | None = rows_field(absent="fill", default=None)
    # float32 [B]; score of the greedy response to the same prompt
    greedy_scores: Tensor | None = rows_field(absent="drop", default=None)
    # Metrics that reward functions log: (sum, count).
    metrics: Mapping[str, tuple[float, float]] = rows_field(total=add_totals, default_factory=dict)
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)  # one value per row

    def divide(self, scale: float) -> RewardOutput:
        """All scores and dense rewards divided by ``scale``; unchanged if it is 0."""
        rewards = {n: getattr(self, n) for n in ("scores", "token_rewards", "greedy_scores")}
        return replace(self, **{n: x / (scale or 1.0) for n, x in rewards.items() if x is not None})


REWARD_ERRORS = "reward_errors/"  # metrics of rows for which a reward failed, with its name
SYNC_GAP = "rollout/sync_gap"


def add_times(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add seconds and counts; weight-sync gaps keep the largest."""
    times: dict[str, float] = {}
    for part in parts:
        for name, x in part.items():
            before = times.get(name, 0.0)
            times[name] = max(before, x) if name == SYNC_GAP else before + x
    return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Record):
    """Responses, their scores, and the time they took."""

    rollout: Rollout
    reward_output: RewardOutput = rows_field(wide_as="rollout.ids")
    times: Mapping[str, float] = rows_field(total=add_times, default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutputs:
    """Log-probabilities and values of a rollout, computed before training on it.  No gradients."""

    logprobs: Tensor  # float32 [B, R]; current policy, the denominator of the ratio
    entropy: Tensor | None = None  # float32 [B, R]; of the policy, in nats
    ref_logprobs: Tensor | None = None  # float32 [B, R]
    values: Tensor | None = None  # float32 [B, R]; V(state before token t), and one extra slot
    last_values: Tensor | None = None  # float32 [B]; V(state after the last token)
    full_kl: Tensor | None = None  # float32 [B, R]; KL(policy || reference) over all tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOutput:
    """Advantages and value targets computed from the rewards."""

    rewards: Tensor  # float32 [B, R]; per token: placed score minus KL penalty
    advantages: Tensor  # float32 [B, R]; 0 outside the mask
    returns: Tensor | None = None  # float32 [B, R]; value targets
    kl: Tensor | None = None  # float32 [B, R]; KL to the reference, per token
    value_mask: Tensor | None = None  # bool [B, R]; where the value model trains; None: the mask
    # bool [B, R]; where the policy trains; None: the rollout's mask
    loss_mask: Tensor | None = None
    deviation: Tensor | None = None  # float32 []; of the advantages before scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience(Record):
    """One training batch: everything the loss reads."""

    prompt_ids: Tensor = rows_field(left=True)  # int64 [B, P]
    prompt_mask: Tensor = rows_field(left=True)  # bool [B, P]
    ids: Tensor  # int64 [B, R]
    loss_mask: Tensor  # bool [B, R]
    response_mask: Tensor  # bool [B, R]
    value_mask: Tensor  # bool [B, R]
    old_logprobs: Tensor  # float32 [B, R]
    rewards: Tensor  # float32 [B, R]
    advantages: Tensor  # float32 [B, R]
    ref_logprobs: Tensor | None = None  # float32 [B, R]
    old_values: Tensor | None = None  # float32 [B, R]
    returns: Tensor | None = None  # float32 [B, R]
    behavior_logprobs: Tensor | None = None  # float32 [B, R]
    allowed_tokens: Tensor | None = rows_field(fill=-1, default=None)  # int64 [B, R, K]
    # bool [B, R]; as in Rollout
    context_start: Tensor | None = rows_field(absent="fill", wide_as="ids", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward and backward pass.

    Weights are computed for the whole optimizer step before it is split: each sums to 1 over all
    micro-batches of the step on all ranks.
    """

    rows: Experience
    token_weight: Tensor  # float32 [b, R]; 0 outside the mask
    value_weight: Tensor  # float32 [b, R]; 0 outside the value mask
    row_weight: Tensor  # float32 [b]; 0 for rows without trained tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """Output of one forward pass over a micro-batch, at response positions only."""

    logprobs: Tensor  # float32 [b, R], with gradient; 0 outside the mask
    entropy: Tensor  # float32 [b, R], 0 outside the mask; with gradient if there is a bonus
    values: Tensor | None = None  # float32 [b, R], with gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Loss as weighted sums, so that micro-batches and ranks simply add up."""

    parts: Mapping[str, Tensor]  # scalars; their sum is minimized
    # scalars; or [n], log ratios of tokens, NaN where one does not train: their range is logged
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def total(self) -> Tensor:
        """The scalar to differentiate."""
        first, *rest = self.parts.values()
        return sum(rest, start=first)


# Marks a metric to be divided by the number of all episodes, even if only some report it.
PER_EPISODE = math.inf


@dataclass(frozen=True, slots=True)
class Metrics:
    """Means that can be merged: ``name -> (sum, count)``."""

    totals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def merge(self, other: Metrics) -> Metrics:
        """Merge two sets of metrics by adding sums and counts."""
        return Metrics(add_totals([self.totals, other.totals]))

    def means(self) -> dict[str, float]:
        """``name -> sum / count``, without names whose count is 0.

        A count of ``PER_EPISODE`` means the count of "environment/turns".
        """
        episodes = self.totals.get("environment/turns", (0.0, 0.0))[1]
        counted = ((n, x, episodes if c == PER_EPISODE else c) for n, (x, c) in self.totals.items())
        return {name: total / count for name, total, count in counted if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished iteration."""

    step: int  # iterations finished, including this one
    metrics: Mapping[str, float]
    rollout: Rollout
    reward_output: RewardOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Returned by a rollout engine after loading weights: version and actual fingerprint."""

    version: int
    fingerprint: str
    # nats per token between engine and learner on the fixed tokens that verify weights; None: the
    # weights were compared bit by bit
    gap: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A sharded tensor of a checkpoint that has not been read yet.

    ``read`` fills tensors of the same shape, sharded or not; each rank reads only its part.
    Collective: every rank reads the same tensors in one call.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[Sequence[tuple[StoredTensor, Tensor]]], None]


def require(x: T | None, name: str) -> T:
    """Return ``x``; for None raise a ValueError that names the Algorithm option to set."""
    if x is None:
        raise ValueError(f"{name} was not computed; set needs_{name}=True on the Algorithm")
    return x
