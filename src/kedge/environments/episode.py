"""One episode while it runs, its limits and seeds, and the record of a batch of finished ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kedge.background import CallThread
from kedge.math.rewards import place_score
from kedge.records.errors import ConfigError, RewardError, RolloutError
from kedge.records.protocols import RewardInfo, Step
from kedge.records.seeds import seed_for
from kedge.records.types import PER_EPISODE, Episodes, PromptBatch, RewardOutput, Rollout, Sampling

_RESERVE = 64  # tokens
_LARGEST_ID = 2**31 - 1
_LARGEST = torch.finfo(torch.float32).max
# Reasons for the end of an episode: the environment ends it (or cuts it off), an answer without a
# call, limits of turns, tokens and seconds, failures of the environment and of its reward.
ENDINGS = (
    *("done", "truncated", "answer", "turn_limit", "token_limit", "time_limit"),
    *("environment_error", "grader_error"),
)


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One row of a batch: its tokens and rewards so far, and its pending call."""

    key: int
    group: int
    prompts: PromptBatch  # one row
    sampling: Sampling
    seed: int  # for sampling the turns
    environment: Any = None
    thread: CallThread | None = None  # of the environment's methods; None: a new one for each call
    round: int | None = None  # of the pool when the environment was taken; None: given back
    tokens: Any = None  # TurnTokens with the row's options of the chat template
    tools: Any = None  # JSON schemas of the row, shown where the environment has none
    prompt_ids: list[int] = field(default_factory=list)  # including the first observation
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # positions at which new contexts begin
    turn: list[int] = field(default_factory=list)  # -1: tokens not sampled by the policy
    logprobs: list[float] | None = field(default_factory=list)
    allowed: list[Tensor] | None = None  # int64 [K] per token
    rewards: dict[int, float] = field(default_factory=dict)  # by position
    version: int | None = None  # oldest policy version in the episode
    versions: list[int] = field(default_factory=list)  # per token; -1: not sampled by the policy
    turns: int = 0
    done: bool = False
    terminated: bool = False
    cut_off: bool = False  # ended by a limit of the rollout engine
    ending: str = ""  # one of ENDINGS
    longest: int = 0  # tokens in the longest turn
    shortened: int = 0  # observations cut to leave room for a turn
    error: str = ""  # why the environment failed
    dropped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)  # summed over the episode
    info: dict[str, float] = field(default_factory=dict)  # latest numbers of the environment's info
    observations: list[list[dict[str, Any]]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)  # so far, with drop_reasoning
    seconds: float = 0.0  # spent in the environment
    limit: int = 0  # token limit of the turn being sampled
    on_result: Callable[[Any], None] | None = None  # receives the result of the environment's call

    def __post_init__(self) -> None:
        self.prompt_ids = self.prompts.ids[0][self.prompts.mask[0]].tolist()

    @property
    def row(self) -> int:
        """Index in the global batch."""
        return int(self.prompts.row[0])

    @property
    def options(self) -> dict[str, Any]:
        """Dataset columns of the row."""
        return {name: values[0] for name, values in self.prompts.columns.items()}

    @property
    def prompt(self) -> object:
        """The prompt as in the dataset."""
        return self.options.get("prompt")

    @property
    def contexts(self) -> list[int]:
        """Positions at which contexts begin that hold a token."""
        return [start for start in self.starts if start < len(self.ids)]

    @property
    def history(self) -> list[int]:
        """What the policy reads: prompt and all tokens so far, or those of the latest context."""
        return self.ids[self.starts[-1] :] if self.starts else self.prompt_ids + self.ids

    def add_response(self, sampled: Rollout, i: int) -> tuple[list[int], bool]:
        """Append the first ``limit`` tokens of row ``i``; returns them, and whether they ended."""
        length = min(int(sampled.response_mask[i].sum()), self.limit)
        ids = sampled.ids[i, :length].tolist()
        if sampled.behavior_logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += sampled.behavior_logprobs[i, :length].tolist()
        if sampled.allowed_tokens is not None:
            before = [torch.tensor([token]) for token in self.ids]
            self.allowed = before if self.allowed is None else self.allowed
            self.allowed += list(sampled.allowed_tokens[i, :length].cpu())
        self.ids += ids
        self.turn += [self.turns] * length
        self.versions += sampled.token_versions[i, :length].tolist()
        self.turns += 1
        self.longest = max(self.longest, length)
        version = int(sampled.policy_version[i])
        self.version = version if self.version is None else min(self.version, version)
        complete = length == int(sampled.response_mask[i].sum())
        return ids, bool(sampled.terminated[i]) and complete

    def add_observation(self, ids: Sequence[int]) -> None:
        """Append tokens from the environment."""
        self.ids += ids
        self.turn += [-1] * len(ids)
        self.versions += [-1] * len(ids)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(ids)
        if self.allowed is not None:
            self.allowed += [torch.tensor([token]) for token in ids]

    def add_reward(self, value: float) -> None:
        """Add a reward to the last turn."""
        at = next((t for t in reversed(range(len(self.turn))) if self.turn[t] >= 0), None)
        if at is not None:
            self.rewards[at] = self.rewards.get(at, 0.0) + value

    def add_metrics(self, info: object) -> None:
        """Add up the numbers in ``info["metrics"]``, and keep the latest in ``info``."""
        if not isinstance(info, Mapping):
            return
        reported = info.get("metrics") or {}
        if not isinstance(reported, Mapping):
            raise RolloutError(f"info['metrics'] must be a mapping, got {describe(reported)}")
        for name, value in reported.items():
            number = read_number(value, f"the metric {name!r} of info['metrics']")
            self.metrics[name] = self.metrics.get(name, 0.0) + number
        for name, value in info.items():
            if isinstance(value, bool | int | float | np.number | np.bool_) and np.isfinite(value):
                self.info[name] = float(value)

    def end(self, ending: str, *, terminated: bool = False, cut_off: bool = False) -> None:
        """End the episode."""
        self.done, self.terminated, self.cut_off = True, terminated, cut_off
        self.ending = ending


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """What ends an episode or cuts its texts, and what a failure of its environment costs."""

    max_turns: int | None = None  # None: as many as its tokens allow
    max_turn_tokens: int | None = None  # of one turn; None: as many as the episode has left
    max_observation_tokens: int | None = None  # of an answer, above which its middle is cut
    # seconds that the environment may take, without sampling, before the episode is truncated
    max_seconds: float | None = None
    context: int | None = None  # tokens of prompt and episode; None: the engine's limit
    # append the observation that follows a truncated episode, untrained, so that a value can be
    # read where values are trained
    keeps_last: bool = False
    timeout: float | None = 60.0  # seconds of one call of an environment
    max_concurrency: int = 256  # calls at the same time
    # Effect of an exception, a timeout or an invalid result: "raise" RolloutError, "drop" the
    # episode from training, or "score" its last turn with ``env_error_score``.
    on_env_error: Literal["raise", "drop", "score"] = "raise"
    env_error_score: float = 0.0

    def __post_init__(self) -> None:
        if self.on_env_error not in ("raise", "drop", "score"):
            raise ConfigError(
                f"on_env_error must be 'raise', 'drop' or 'score', got {self.on_env_error!r}"
            )
        limits = {"max_turns": self.max_turns, "max_turn_tokens": self.max_turn_tokens}
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    @property
    def reserve(self) -> int:
        """Context tokens reserved for the observation after the last turn."""
        return min(_RESERVE, (self.context or 0) // 8) if self.keeps_last else 0

    def tokens_left(self, episode: Episode) -> int:
        """Tokens left for the episode."""
        left = episode.sampling.max_new_tokens - len(episode.ids)
        if self.context is None:
            return left
        return min(left, self.context - self.reserve - len(episode.history))

    def turn_limit(self, episode: Episode) -> int:
        """Maximum tokens of the next turn."""
        left = self.tokens_left(episode)
        return min(left, self.max_turn_tokens or left)

    def prompt_limit(self, sampling: Sampling) -> int | None:
        """Maximum tokens of a prompt with its first observation; None: no limit."""
        if self.context is None:
            return None
        turn = self.max_turn_tokens or sampling.max_new_tokens
        return self.context - self.reserve - min(turn, self.context // 2)

    def observation_limit(self, episode: Episode, length: int, *, before: int = 0) -> int:
        """Tokens to keep of an observation of ``length`` tokens; 0 ends the episode.

        Cut to ``max_observation_tokens``.  Cut further if the policy would have less room than its
        longest turn so far, but never reserve more than half of the remaining room (or
        ``max_turn_tokens``).  The first ``before`` tokens are a conversation that is read again.
        """
        room = self.tokens_left(episode)
        length = min(length, before + (self.max_observation_tokens or length))
        spare = min(self.max_turn_tokens or room, room // 2)
        if room - length < episode.longest <= spare:
            return room - spare
        return length if length < room else 0

    def largest_observation(self, episode: Episode) -> int:
        """Tokens above which an observation is cut in any case."""
        most = max(self.tokens_left(episode), 0)
        return max(most, self.last_observation_limit(episode)) if self.keeps_last else most

    def last_observation_limit(self, episode: Episode) -> int:
        """Maximum tokens of the observation after the last turn of a truncated episode."""
        room = max(self.tokens_left(episode), episode.sampling.max_new_tokens // 4)
        return room if self.context is None else min(room, self.context - len(episode.history))

    def reached_limit(self, episode: Episode) -> str:
        """The limit that an episode has reached: turns, or seconds of its environment."""
        if self.max_seconds is not None and episode.seconds > self.max_seconds:
            return "time_limit"
        return "turn_limit" if episode.turns == self.max_turns else ""


def check_turn_tokens(sampling: Sampling, most: int | None) -> None:
    """Check that the limit of the first turn allows the minimum length."""
    if most is not None and sampling.min_new_tokens > most:
        raise ConfigError(
            f"min_new_tokens={sampling.min_new_tokens} must be at most max_turn_tokens={most}: no"
            " turn may end before min_new_tokens"
        )


def check_turns_end(sampling: Sampling, most: int | None) -> None:
    """Check that turns can end before the episode's tokens are spent, and can be long enough."""
    check_turn_tokens(sampling, most)
    if not (sampling.stop_ids or sampling.stop_strings or most):
        raise ConfigError(
            "environments need turns that end, but there is no stop token: set"
            " stop_token='eos', stop_token_ids, stop_strings or max_turn_tokens"
        )


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn; the first turn has the seed of the episode."""
    return seed if turn == 0 else seed_for(seed, "turn", turn)


def environment_seed(seed: int, group: int) -> int:
    """The seed of a group's environments, which is shared so that episodes compare."""
    return seed_for(seed, "environment", group) >> 31  # 32 bits: any generator accepts them


def read_step(result: object) -> Step:
    """Check the result of ``Environment.step``; raises RolloutError."""
    if not isinstance(result, tuple) or len(result) != 5:
        raise RolloutError(
            "step must return (observation, reward, terminated, truncated, info), got"
            f" {describe(result)}"
        )
    observation, reward, terminated, truncated, info = result
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if isinstance(value, str | bytes | Mapping | list | tuple):  # "no" would be true
            raise RolloutError(f"{name} must be True or False, got {describe(value)}")
    reward = read_number(reward, "a reward")
    return observation, reward, bool(terminated), bool(truncated), info


def read_number(value: Any, name: str) -> float:
    """Check for a number that is finite in float32; raises RolloutError."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RolloutError(f"{name} must be a number, got {describe(value)}") from None
    if not abs(number) <= _LARGEST:
        raise RolloutError(f"{name} must be finite in float32, got {number}")
    return number


def read_token_ids(values: Any, vocabulary: int | None, name: str) -> list[int]:
    """Check for token ids below ``vocabulary`` (None: any that fit); raises RolloutError."""
    size = _LARGEST_ID + 1 if vocabulary is None else vocabulary
    if isinstance(values, Tensor | np.ndarray):
        if values.ndim != 1 or "int" not in str(values.dtype):
            raise RolloutError(
                f"{name} must hold integers in one dimension, got a {type(values).__name__} of"
                f" {values.dtype} and shape {tuple(values.shape)}"
            )
        values = values.tolist()
    ids = []
    for value in values:
        try:
            token = -1 if isinstance(value, bool) else index(value)
        except TypeError:
            token = -1
        if not 0 <= token < size:
            raise RolloutError(
                f"{name} holds token {str(value)[:30]}, but the vocabulary has {size} tokens: ids"
                f" are integers from 0 to {size - 1}"
            )
        ids.append(token)
    return ids


def describe(value: object) -> str:
    """The type of a value and the start of its text."""
    text = repr(value)
    kind = "" if value is None else f"a {type(value).__name__}: "
    return kind + (text if len(text) <= 80 else text[:77] + "...")


def build_rollout(
    prompts: PromptBatch,
    episodes: Sequence[Episode],
    *,
    pad_id: int,
    spare: int,
    totals: Sequence[Mapping[str, tuple[float, float]]],
    columns: Mapping[str, Sequence[Any]],
) -> Rollout:
    """Build the rollout of episodes, one per row of ``prompts``, with metrics and columns."""
    for episode in episodes:
        if not episode.ids:  # no turn was sampled: add one token that is not trained on
            episode.add_observation([pad_id])
    lengths = torch.tensor([len(e.ids) for e in episodes])
    width = int(lengths.max()) + spare
    turn = pad_rows([e.turn for e in episodes], width, torch.int64, -1)
    rewards = torch.zeros(turn.shape, dtype=torch.float64)
    for i, episode in enumerate(episodes):
        for position, value in episode.rewards.items():
            rewards[i, position] = value
    recorded = [e.logprobs for e in episodes if e.logprobs is not None]
    logprobs = None
    if len(recorded) == len(episodes):
        logprobs = pad_rows(recorded, width, torch.float32, 0.0)
    trained = turn >= 0
    starts = torch.zeros_like(trained)
    for i, episode in enumerate(episodes):
        starts[i, episode.contexts] = True
    versions = None  # use the versions of the rows
    if any(v not in (-1, e.version) for e in episodes for v in e.versions):
        versions = pad_rows([e.versions for e in episodes], width, torch.int64, -1)
    rollout = Rollout(
        prompts=stack_rows(prompts, [e.prompt_ids for e in episodes], prompts.group, pad_id),
        ids=pad_rows([e.ids for e in episodes], width, torch.int64, pad_id),
        loss_mask=trained,
        response_mask=torch.arange(width) < lengths[:, None],
        terminated=torch.tensor([e.terminated for e in episodes]),
        policy_version=torch.tensor([-1 if e.version is None else e.version for e in episodes]),
        behavior_logprobs=logprobs,
        allowed_tokens=_allowed(episodes, width),
        token_version=versions,
        context_start=starts if starts.any() else None,
        episodes=Episodes(
            turn=turn,
            rewards=rewards,
            valid=torch.tensor([not e.dropped for e in episodes]) & trained.any(1),
            columns={
                "totals": totals,
                "observations": [e.observations for e in episodes],
                "metrics": [dict(e.metrics) for e in episodes],
                "error": [e.error for e in episodes],
                "ending": [e.ending for e in episodes],
                **columns,
            },
        ),
    )
    return rollout.to(prompts.ids.device)


def pad_rows(
    rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype, fill: float
) -> Tensor:
    """Pad rows to one tensor [rows, width], with ``fill`` after the end of each."""
    out = torch.full((len(rows), width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return out


def _allowed(episodes: Sequence[Episode], width: int) -> Tensor | None:
    if all(e.allowed is None for e in episodes):
        return None
    rows = [e.allowed or [torch.tensor([token]) for token in e.ids] for e in episodes]
    most = max(len(x) for row in rows for x in row)
    out = torch.full((len(rows), width, most), -1)
    for i, row in enumerate(rows):
        for t, tokens in enumerate(row):
            out[i, t, : len(tokens)] = tokens
    return out


def stack_rows(
    prompts: PromptBatch,
    ids: Sequence[Sequence[int]],
    group: Tensor,
    pad_id: int,
    *,
    limits: Sequence[int] | None = None,
) -> PromptBatch:
    """``prompts`` with other token ids, groups and limits; rows are left-padded."""
    backward = [torch.tensor([*reversed(row)], dtype=torch.int64) for row in ids]
    lengths = torch.tensor([len(row) for row in ids])
    stacked = pad_sequence(backward, batch_first=True, padding_value=pad_id).flip(1)
    mask = torch.arange(stacked.shape[1]) >= (stacked.shape[1] - lengths)[:, None]
    device = prompts.ids.device
    return PromptBatch(
        ids=stacked.to(device),
        mask=mask.to(device),
        group=group,
        row=prompts.row,
        columns=prompts.columns,
        limit=None if limits is None else torch.tensor(limits).to(device),
    )


def episode_totals(
    episodes: Sequence[Episode], in_environments: float, in_model: float, hung: int
) -> list[dict[str, tuple[float, float]]]:
    """Metrics of each episode, with an equal share of the seconds of all."""
    share = 1 / len(episodes)
    of_batch = {
        "environment/seconds": (in_environments * share, 1.0),
        "environment/model_seconds": (in_model * share, 1.0),
        "environment/hung_calls": (float(hung), 1.0),
    }
    return [_totals_of(episode) | of_batch for episode in episodes]


def _totals_of(episode: Episode) -> dict[str, tuple[float, float]]:
    rewards, turns = episode.rewards, float(episode.turns)
    final = abs(rewards[max(rewards)]) if rewards else 0.0
    totals = {
        "environment/turns": (turns, 1.0),
        "environment/errors": (float(bool(episode.error)), 1.0),
        "environment/cut_observations": (float(episode.shortened), 1.0),
        "environment/new_contexts": (float(len(episode.contexts)), 1.0),
        "environment/reward_per_turn": (sum(rewards.values()), turns),
        "environment/last_reward_share": (final, sum(map(abs, rewards.values()))),
        "environment/loss_tokens": (float(sum(t >= 0 for t in episode.turn)), len(episode.ids)),
    }
    totals |= {f"environment/ended_{x}": (float(episode.ending == x), 1.0) for x in ENDINGS}
    reported = {f"environment/{name}": (x, 1.0) for name, x in episode.info.items()}
    reported |= {f"environment/{name}": (x, PER_EPISODE) for name, x in episode.metrics.items()}
    return reported | totals  # a metric of the environment never replaces one of these


class EpisodeReward:
    """The reward source of environments: the score of a row is the sum of its rewards.

    ``token_rewards`` move each reward from the end of the episode, where algorithms place the
    score, to the last token of its turn; they sum to 0 in every row.
    """

    info = RewardInfo(name="environment")

    def score(self, rollout: Rollout) -> RewardOutput:
        """Sum the environments' rewards.

        Raises:
            RewardError: the rollout does not come from environments.
        """
        if rollout.episodes is None:
            raise RewardError(
                "EpisodeReward needs episodes of environments; use it with EnvironmentRollouts"
            )
        rewards = rollout.episodes.rewards
        total = rewards.double().sum(1).float()
        return RewardOutput(
            scores=total,
            valid=rollout.episodes.valid,
            token_rewards=rewards - place_score(total, rollout.loss_mask),
        )
