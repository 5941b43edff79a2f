"""Weighted mixture of reward sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from kedge.backends.rewards.source_scores import (
    AsyncRewardSource,
    Pending,
    SourceScores,
    to_source_scores,
)
from kedge.errors import ConfigError, RewardError
from kedge.protocols import RewardSource
from kedge.types import RewardOutput, Rollout


class Mixture:
    """Weighted sum of the sources that apply to a row.

        score_i = sum over sources s that apply to row i of  weight_s * score_s,i

    Per-token rewards add up with the same weights.  Every source's own scores are kept in
    ``components`` under its name, without the weight.  Rows on which a source
    failed, or to which no source applies, are not valid.

    Args:
        sources: (name, source, weight) triples; repeated names get ``_2``, ``_3``, ...
        on_unscored: a row to which no source applies is dropped (``"drop"``) or is an error
            (``"raise"``).

    Raises:
        ConfigError: ``sources`` is empty.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, RewardSource, float]],
        *,
        on_unscored: Literal["drop", "raise"] = "drop",
    ) -> None:
        if not sources:
            raise ConfigError("a mixture needs at least one reward source")
        names = unique_names([name for name, _, _ in sources])
        self._sources = [
            (name, source, float(weight))
            for name, (_, source, weight) in zip(names, sources, strict=True)
        ]
        self.name = "+".join(names)
        self.columns = columns_read([source for _, source, _ in sources])
        self._on_unscored = on_unscored

    def score(self, rollout: Rollout) -> RewardOutput:
        """The weighted sum for all rows; asynchronous sources run at the same time."""
        return self.begin(rollout)().to_reward_output()

    def begin(self, rollout: Rollout) -> Pending:
        """Start all asynchronous sources."""
        started = [_begin(source, rollout) for _, source, _ in self._sources]
        return lambda: self._mix(rollout, [result() for result in started])

    def _mix(self, rollout: Rollout, outputs: list[SourceScores]) -> SourceScores:
        applies = torch.stack([output.applies for output in outputs]).any(0)
        failed = torch.stack([output.failed for output in outputs]).any(0)
        unscored = ~applies & ~failed
        if self._on_unscored == "raise" and bool(unscored.any()):
            row = int(rollout.prompts.row[int(unscored.nonzero()[0])])
            raise RewardError(
                f"no reward source applies to row {row}: {self.name} all returned None; let one of"
                " them score every row, or set on_unscored='drop'"
            )
        scores = torch.zeros(len(rollout), device=rollout.ids.device)
        dense = None
        parts: dict[str, torch.Tensor] = {}
        for (name, _, weight), output in zip(self._sources, outputs, strict=True):
            scores = scores + weight * torch.where(output.applies, output.scores, 0.0)
            if output.token_rewards is not None:
                added = weight * torch.where(output.applies[:, None], output.token_rewards, 0.0)
                dense = added if dense is None else dense + added
            parts |= _named(name, output)
        return SourceScores(
            scores=scores, applies=applies, failed=failed, components=parts, token_rewards=dense
        )


def columns_read(sources: Iterable[RewardSource]) -> frozenset[str] | None:
    """Dataset columns that any of the sources reads; None if unknown."""
    read: frozenset[str] = frozenset()
    for source in sources:
        columns = getattr(source, "columns", None)
        if columns is None:
            return None
        read |= columns
    return read


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, with ``_2``, ``_3``, ... appended to repetitions."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return unique


def _begin(source: RewardSource, rollout: Rollout) -> Pending:
    if isinstance(source, AsyncRewardSource):
        return source.begin(rollout)
    return lambda: to_source_scores(_score(source, rollout))


def _score(source: RewardSource, rollout: Rollout) -> RewardOutput:
    name, output = type(source).__name__, source.score(rollout)
    if not isinstance(output, RewardOutput):
        raise RewardError(
            f"{name}.score must return a kedge.types.RewardOutput, got {type(output).__name__}"
            " (only a plain function of completions may return a list)"
        )
    shapes = (tuple(output.scores.shape), tuple(output.valid.shape))
    if shapes != ((len(rollout),),) * 2:
        raise RewardError(
            f"{name}.score returned scores of shape {shapes[0]} and valid of shape {shapes[1]} for"
            f" {len(rollout)} responses; both must have one entry per response"
        )
    return output


def _named(name: str, output: SourceScores) -> dict[str, torch.Tensor]:
    parts = dict(output.components)
    if len(parts) == 1:
        return {name: next(iter(parts.values()))}
    if not parts:
        return {name: torch.where(output.applies, output.scores, torch.nan)}
    return {f"{name}/{part}": scores for part, scores in parts.items()}
