"""Rewards from regular expressions, with a time limit against catastrophic backtracking."""

from __future__ import annotations

from functools import partial
from typing import Any

from kedge.errors import ConfigError, RewardError
from kedge.verifiers.base import Unanswered, Verifier

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

    A match that times out scores 0 and is counted in ``timeouts/<name>``.  ``.`` also matches
    newlines.  The syntax is that of the package ``regex``, which extends Python's ``re``.

    Args:
        pattern: used for all rows; None: read from ``column``.
        column: dataset column with the pattern.
        mode: ``"search"`` (anywhere), ``"match"`` (from the start) or ``"fullmatch"``.
        ignore_case: match case-insensitively.
        timeout: seconds of processor time for one response.
        workers: responses matched concurrently.
        name: of the reward.

    Raises:
        ConfigError: the pattern is not a valid regular expression, or ``mode`` is unknown.
    """
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r} must be one of {', '.join(_MODES)}")
    if timeout <= 0:
        raise ConfigError(f"timeout={timeout} must be greater than 0")
    match = partial(_match, mode=mode, ignore_case=ignore_case, timeout=timeout)
    if pattern is not None:
        try:
            match(pattern, "")
        except ValueError as error:
            raise ConfigError(f"pattern={pattern!r} {error}") from error
    check = partial(_check, pattern, match=match, name=name)
    return Verifier(check, name=name, column=column if pattern is None else None, threads=workers)


def _check(pattern: str | None, text: str, truth: Any, *, match: Any, name: str) -> float:
    expression = truth if pattern is None else pattern
    if not isinstance(expression, str):
        raise RewardError(
            f"verifier {name}: the ground truth must be a regular expression as text, got"
            f" {expression!r}"
        )
    try:
        return float(match(expression, text))
    except TimeoutError as error:
        raise Unanswered("timeouts") from error
    except ValueError as error:
        raise RewardError(f"verifier {name}: the pattern {expression[:80]!r} {error}") from error


def _match(pattern: str, text: str, *, mode: str, ignore_case: bool, timeout: float) -> bool:
    """Whether a pattern matches; raises TimeoutError, or ValueError for an invalid pattern."""
    import regex

    flags = regex.DOTALL | (regex.IGNORECASE if ignore_case else 0)
    try:
        function = getattr(regex.compile(pattern, flags), mode)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"is not a valid regular expression: {error}") from error
    return function(text, timeout=timeout, concurrent=True) is not None


regex_match = regex_reward()
