"""Rewards for the length of a response, in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kedge.errors import ConfigError, RewardError
from kedge.verifiers.base import read_column

LengthReward = Callable[..., list[float | None]]


def soft_overlong_punishment(*, max_length: int, cache: int) -> LengthReward:
    """A penalty that grows over the last tokens before the limit.

        0                                  for |y| <= max_length - cache
        (max_length - cache - |y|) / cache for |y| <= max_length
        -1                                 beyond

    Source: DAPO (arXiv 2503.14476), equation 13.

    Args:
        max_length: longest response, in tokens.
        cache: width of the penalized interval, in tokens.

    Raises:
        ConfigError: ``cache`` is not in 1..``max_length``.
    """
    if not 0 < cache <= max_length:
        raise ConfigError(f"cache={cache} must be at least 1 and at most max_length={max_length}")
    free = max_length - cache

    def soft_overlong(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        return [max(-1.0, min(0.0, (free - len(ids)) / cache)) for ids in completion_ids]

    return soft_overlong


def length_close_to(*, column: str = "ground_truth", slope: float = 1.0) -> LengthReward:
    """1 at the target length, decreasing linearly with the relative distance, never below 0.

        max(0, 1 - slope * | |y| - target | / target)

    Args:
        column: dataset column with the target length in tokens.
        slope: steepness.
    """

    def length_close(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        targets = _read_lengths(columns, column, len(completion_ids), "length_close")
        return [
            None if n is None else max(0.0, 1.0 - slope * abs(len(ids) - n) / n)
            for ids, n in zip(completion_ids, targets, strict=True)
        ]

    return length_close


def length_at_most(
    *, column: str = "ground_truth", slope: float = 0.01, offset: float = 0.5
) -> LengthReward:
    """Decreases with the number of tokens; between 0 and 1.

        clip(slope * (allowed - |y|) + offset, 0, 1)

    Source: the budget term of LCPO-Max (arXiv 2503.04697), equation 3.

    Args:
        column: dataset column with the allowed length in tokens.
        slope: reward per token.
        offset: reward at exactly the allowed length.
    """

    def length_max(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        allowed = _read_lengths(columns, column, len(completion_ids), "length_max")
        return [
            None if n is None else min(1.0, max(0.0, slope * (n - len(ids)) + offset))
            for ids, n in zip(completion_ids, allowed, strict=True)
        ]

    return length_max


def _read_lengths(columns: dict[str, Any], column: str, rows: int, name: str) -> list[int | None]:
    values = read_column(columns, column, rows, name)
    for value in values:
        usable = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (usable and value > 0):
            raise RewardError(
                f"{name}: the value {value!r} in column {column!r} must be a positive number of"
                " tokens"
            )
    return values
