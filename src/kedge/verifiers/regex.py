"""Rewards from regular expressions, safe against catastrophic backtracking."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from kedge.errors import ConfigError, RewardError
from kedge.verifiers.base import Verifier
from kedge.verifiers.worker import TaskError, WorkerPool

_MODES = ("search", "match", "fullmatch")


def regex_reward(
    pattern: str | None = None,
    *,
    column: str = "ground_truth",
    mode: str = "search",
    ignore_case: bool = False,
    timeout: float = 1.0,
    workers: int = 1,
    name: str = "regex",
) -> Verifier:
    """A reward of 1 for responses that a regular expression matches, else 0.

    Matching runs in a helper process: a match that times out scores 0 and is counted in
    ``timeouts/<name>``.  ``.`` also matches newlines.

    Args:
        pattern: used for all rows; None: read from ``column``.
        column: dataset column with the pattern.
        mode: ``"search"`` (anywhere), ``"match"`` (from the start) or ``"fullmatch"``.
        ignore_case: match case-insensitively.
        timeout: seconds of wall clock for one response.
        workers: helper processes.
        name: of the reward.

    Raises:
        ConfigError: the pattern is not a valid regular expression, or ``mode`` is unknown.
    """
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r} must be one of {', '.join(_MODES)}")
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"pattern={pattern!r} is not a valid regular expression: {error}"
            ) from error
    pool = WorkerPool(
        "kedge.verifiers.regex:matches", timeout=timeout, size=workers, memory_mb=1024
    )

    check = partial(_check, pattern, pool=pool, options=(mode, ignore_case), name=name)
    truth_column = column if pattern is None else None
    return Verifier(check, name=name, column=truth_column, threads=workers)


def _check(
    pattern: str | None,
    text: str,
    truth: Any,
    *,
    pool: WorkerPool,
    options: tuple[str, bool],
    name: str,
) -> float:
    expression = truth if pattern is None else pattern
    if not isinstance(expression, str):
        raise RewardError(
            f"verifier {name}: the ground truth must be a regular expression as text, got"
            f" {expression!r}"
        )
    try:
        return float(pool.call(expression, text, *options))
    except TaskError as error:
        raise RewardError(
            f"verifier {name}: the pattern {expression[:80]!r} cannot be matched: {error}"
        ) from error


def matches(pattern: str, text: str, mode: str, ignore_case: bool) -> bool:
    """The worker task: whether ``pattern`` matches ``text``."""
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
    return getattr(re.compile(pattern, flags), mode)(text) is not None


regex_match = regex_reward()
