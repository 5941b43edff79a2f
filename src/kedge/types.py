"""The records that flow through training, in the order they are made.

Axes, used in every comment below:
    B  rows, one sampled response each          P  prompt tokens, left-padded
    R  response tokens, right-padded            b  rows of one micro-batch
Booleans are True where a token is real.  Log-probabilities are natural logarithms (nats).
"""

# ruff: noqa: RUF009  (rows_field() returns dataclasses.field)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from kedge.records import Record, rows_field, widened

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The distribution that responses are drawn from, and where they end."""

    max_new_tokens: int
    min_new_tokens: int = 0  # no stop token is sampled before this many
    temperature: float = 1.0  # logits are divided by it; 0 takes the most likely token
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    stop_ids: tuple[int, ...] = ()  # the stop token is kept as the last token of the response
    stop_strings: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """Whether tokens of positive probability can never be sampled."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch(Record):
    """The prompts of one training step, one row per response to be sampled."""

    ids: Tensor = rows_field(left=True)  # int64 [B, P]
    mask: Tensor = rows_field(left=True)  # bool  [B, P]
    group: Tensor  # int64 [B]; rows with equal values answer the same prompt
    row: Tensor  # int64 [B]; index in the batch of all ranks: names the row's random stream
    # Dataset columns, one value per row.
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)


def separated(parts: Sequence[PromptBatch]) -> list[PromptBatch]:
    """The parts with other group names, so that no two parts share one."""
    apart, offset = [], 0
    for part in parts:
        names, group = part.group.unique(return_inverse=True)
        apart.append(replace(part, group=group + offset))
        offset += len(names)
    return apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout(Record):
    """Prompts and the responses sampled for them."""

    prompts: PromptBatch
    ids: Tensor  # int64 [B, R]
    # bool  [B, R]; tokens the policy produced (the stop token too): these get loss
    loss_mask: Tensor
    # bool [B, R]; all real tokens, a prefix of each row; mask implies present
    response_mask: Tensor
    terminated: Tensor  # bool [B]; ended by a stop token or stop string, not by the length limit
    version: Tensor  # int64 [B]; policy version that sampled the row, -1 = unknown
    behavior_logprobs: Tensor | None = None  # float32 [B, R]; recorded while sampling
    # int64 [B, R, K]; tokens that could be sampled, -1 = unused slot
    allowed_tokens: Tensor | None = rows_field(fill=-1, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutput(Record):
    """What the reward source said of each response."""

    scores: Tensor  # float32 [B]
    valid: Tensor  # bool [B]; False: the row could not be scored and takes no part in training
    components: Mapping[str, Tensor] = field(default_factory=dict)  # float32 [B], NaN: n/a
    # float32 [B, R]; dense rewards, on top of the score
    token_rewards: Tensor | None = rows_field(absent="fill", default=None)
    # float32 [B]; score of the greedy response to the same prompt
    greedy_scores: Tensor | None = rows_field(absent="drop", default=None)
    # What reward functions measured: sum and count.
    metrics: Mapping[str, tuple[float, float]] = rows_field(totals=True, default_factory=dict)
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)  # and said of each row

    def widened_to(self, rollout: Rollout) -> RewardOutput:
        """With dense rewards as wide as the responses of ``rollout``."""
        if self.token_rewards is None:
            return self
        dense = widened(self.token_rewards, [rollout.ids.shape[1]])
        return replace(self, token_rewards=dense)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutputs:
    """What the models say of a rollout before the update.  No gradients."""

    logprobs: Tensor  # float32 [B, R]; current policy, the anchor of the ratio
    entropy: Tensor | None = None  # float32 [B, R]; of the policy's distribution, nats
    ref_logprobs: Tensor | None = None  # float32 [B, R]
    values: Tensor | None = None  # float32 [B, R]; V(state before token t), and one slot beyond
    last_values: Tensor | None = None  # float32 [B]; V(state after the last token)
    full_kl: Tensor | None = None  # float32 [B, R]; KL(policy || reference) over the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOutput:
    """Rewards turned into what the update learns from."""

    rewards: Tensor  # float32 [B, R]; per token, score placed and KL subtracted
    advantages: Tensor  # float32 [B, R]; 0 off the mask
    returns: Tensor | None = None  # float32 [B, R]; value targets
    kl: Tensor | None = None  # float32 [B, R]; policy against reference, per token
    value_mask: Tensor | None = None  # bool [B, R]; where the value trains; None: the mask
    # bool [B, R]; where the policy trains; None: the rollout's mask
    loss_mask: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience(Record):
    """One training batch."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one optimizer step, with loss weights fixed before the step was cut up.

    Each weight sums to 1 over the whole optimizer step, over all ranks.
    """

    rows: Experience
    token_weight: Tensor  # float32 [b, R]; 0 off the mask
    value_weight: Tensor  # float32 [b, R]; 0 off the value mask
    row_weight: Tensor  # float32 [b]; 0 for rows without a single trained token


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """One forward pass over a micro-batch, response positions only."""

    logprobs: Tensor  # float32 [b, R], with gradient; 0 off the mask
    entropy: Tensor  # float32 [b, R], no gradient; 0 off the mask
    values: Tensor | None = None  # float32 [b, R], with gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Weighted sums: micro-batches and ranks just add up."""

    parts: Mapping[str, Tensor]  # scalars; their sum is what is minimized
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # scalars

    @property
    def total(self) -> Tensor:
        """The scalar to differentiate."""
        first, *rest = self.parts.values()
        return sum(rest, start=first)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Means that can be merged: ``name -> (sum, count)``."""

    totals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def merge(self, other: Metrics) -> Metrics:
        """The metrics of both; sums and counts add."""
        merged = dict(self.totals)
        for name, (total, count) in other.totals.items():
            before = merged.get(name, (0.0, 0.0))
            merged[name] = (before[0] + total, before[1] + count)
        return Metrics(merged)

    def means(self) -> dict[str, float]:
        """``name -> sum / count``, without the names that counted nothing."""
        return {name: total / count for name, (total, count) in self.totals.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What an engine says after loading weights: which version, and what it really holds."""

    version: int
    fingerprint: str


def require(x: T | None, name: str) -> T:
    """Narrow an optional field, naming the one to ask for when it is missing."""
    if x is None:
        raise ValueError(f"{name} was not computed; set needs_{name}=True on the Algorithm")
    return x
