"""Reward source that calls a Python function."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.backends.rewards import call as background
from kedge.backends.rewards.call import Signature, arguments, function_name, is_async, one_row
from kedge.backends.rewards.log import RewardLog
from kedge.backends.rewards.source_scores import Pending, SourceScores
from kedge.backends.rewards.texts import TextCache, Texts, row_name
from kedge.backends.rewards.values import Values, read_values
from kedge.errors import ConfigError, RewardError
from kedge.types import RewardOutput, Rollout

logger = logging.getLogger(__name__)
OnError = Literal["raise", "score", "drop"]


class RewardFunction:
    """Scores a response with a Python function, synchronous or asynchronous.

    The function is called once for all rows with those of the following keyword arguments that it
    accepts (all of them if it takes ``**kwargs``): ``prompts`` and ``completions`` (text, or chat
    messages if the dataset has chats), ``prompt_ids`` and ``completion_ids`` (token ids, including
    the stop token), every other dataset column by its name, ``trainer_state``,
    ``log_metric(name, value, weight=1)`` and ``log_extra(column, values)``.  It returns one entry
    per row: a number, None where it does not apply, or one number per response token.

    Args:
        function: the callable.
        texts: the decoded rollout, shared with other sources.
        name: key of the component in the reward output; default: the function's name.
        on_error: a row for which the function raises or does not return a finite number stops
            training (``"raise"``), gets ``error_score`` (``"score"``), or is dropped (``"drop"``).
            A call that raised is repeated row by row to find the row.
        error_score: see ``on_error``.
        log: collects what the function logs, and ``reward_errors/<name>``.
        trainer_state: returns the value of the ``trainer_state`` argument.
        dataset_columns: columns of the prompts, which must include those that the function
            requires.  None: unchecked.

    Raises:
        ConfigError: ``function`` is not callable, or an option is invalid.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        texts: TextCache,
        *,
        name: str | None = None,
        on_error: OnError = "raise",
        error_score: float | None = None,
        log: RewardLog | None = None,
        trainer_state: Callable[[], object] | None = None,
        dataset_columns: Collection[str] | None = None,
    ) -> None:
        if not callable(function):
            raise ConfigError(
                f"a reward function must be callable, got {type(function).__name__} {function!r}"
            )
        _check_error_options(on_error, error_score)
        self.name = name or function_name(function)
        self._function, self._texts = function, texts
        self._signature = Signature(function, self.name)
        self.columns = self._signature.columns
        if dataset_columns is not None:
            self._signature.check(dataset_columns)
        self._on_error, self._error_score = on_error, error_score
        self._log = log or RewardLog()
        self._state = trainer_state or (lambda: None)

    def score(self, rollout: Rollout) -> RewardOutput:
        """One reward output for all rows; rows the function does not apply to are not valid."""
        return self.begin(rollout)().to_reward_output()

    def begin(self, rollout: Rollout) -> Pending:
        """Start an asynchronous function; a synchronous one runs when the result is asked for."""
        texts = self._texts.of(rollout)
        kwargs = arguments(texts, self._signature, self._log, self._state())
        started = background.submit(self._function(**kwargs)) if is_async(self._function) else None
        return lambda: self._finish(texts, kwargs, started)

    def _finish(
        self, texts: Texts, kwargs: dict[str, Any], started: Future[Any] | None
    ) -> SourceScores:
        lengths = [len(ids) for ids in texts.completion_ids]
        width = texts.rollout.ids.shape[1]
        try:
            returned = started.result() if started else self._call(kwargs)
        except Exception as error:
            values = self._row_by_row(texts, kwargs, lengths, width, error)
        else:
            values = read_values(returned, lengths, width, self.name)
        if values.errors:
            self._apply_error_policy(texts, values)
        return self._to_source_scores(texts.rollout, values)

    def _call(self, kwargs: dict[str, Any]) -> Any:
        returned = self._function(**kwargs)
        return background.submit(returned).result() if inspect.isawaitable(returned) else returned

    def _row_by_row(
        self,
        texts: Texts,
        kwargs: dict[str, Any],
        lengths: list[int],
        width: int,
        error: Exception,
    ) -> Values:
        values = Values()
        for row, call in enumerate(self._single_row_calls(kwargs, len(lengths))):
            returned, cause = _attempt(call)
            if cause is None:
                read_values(returned, [lengths[row]], width, self.name, values=values, first=row)
            elif self._on_error == "raise":
                raise RewardError(
                    f"reward function {self.name} raised {_describe(cause)} on"
                    f" {self._row(texts, row)}; fix it, or choose on_reward_error='score' or 'drop'"
                ) from cause
            else:
                values.errors[row] = f"raised {_describe(cause)}"
        if self._on_error == "raise":
            raise RewardError(
                f"reward function {self.name} raised {_describe(error)} when called with all"
                f" {len(lengths)} rows, but not on any single row; check what depends on the batch"
            ) from error
        if not values.errors:
            logger.warning(
                "reward function %s raised %s when called with all rows, but not on any single"
                " row; using the rewards of the single-row calls",
                self.name,
                _describe(error),
            )
        return values

    def _single_row_calls(self, kwargs: dict[str, Any], rows: int) -> list[Callable[[], Any]]:
        """One call per row; asynchronous ones start at once."""
        calls = [one_row(kwargs, row) for row in range(rows)]
        if is_async(self._function):
            return [background.submit(self._function(**call)).result for call in calls]
        return [partial(self._call, call) for call in calls]

    def _apply_error_policy(self, texts: Texts, values: Values) -> None:
        row, problem = next(iter(values.errors.items()))
        message = f"reward function {self.name} {problem}, on {self._row(texts, row)}"
        if self._on_error == "raise":
            raise RewardError(f"{message}; fix it, or choose on_reward_error='score' or 'drop'")
        self._log.metric(f"reward_errors/{self.name}", float(len(values.errors)))
        action = "dropped" if self._on_error == "drop" else f"scored {self._error_score}"
        logger.warning("%d rows %s: %s", len(values.errors), action, message)
        if self._error_score is not None and self._on_error == "score":
            values.scores.update(dict.fromkeys(values.errors, self._error_score))
            values.errors.clear()

    def _to_source_scores(self, rollout: Rollout, values: Values) -> SourceScores:
        device, count = rollout.ids.device, len(rollout)
        scores, component = torch.zeros(count), torch.full((count,), torch.nan)
        applies, failed = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
        dense: Tensor | None = torch.zeros(rollout.ids.shape) if values.dense else None
        rows = list(values.scores)
        scores[rows] = component[rows] = torch.tensor(list(values.scores.values()))
        for row, numbers in values.dense.items():
            if dense is not None:
                dense[row, : len(numbers)] = torch.tensor(numbers)
            component[row] = sum(numbers)
        applies[[*values.scores, *values.dense]] = True
        failed[list(values.errors)] = True
        return SourceScores(
            scores=scores.to(device),
            applies=applies.to(device),
            failed=failed.to(device),
            components={self.name: component.to(device)},
            token_rewards=None if dense is None else dense.to(device),
        )

    def _row(self, texts: Texts, row: int) -> str:
        return row_name(texts.rollout, row, texts.prompts[row])


def _attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _check_error_options(on_error: str, error_score: float | None) -> None:
    if on_error not in ("raise", "score", "drop"):
        raise ConfigError(f"on_reward_error={on_error!r} must be 'raise', 'score' or 'drop'")
    if on_error == "score" and error_score is None:
        raise ConfigError(
            "on_reward_error='score' needs reward_error_score, the score for a failed row"
        )
