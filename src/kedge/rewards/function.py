"""Reward source that calls a Python function, and logging for such functions."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.background import in_thread, on_event_loop
from kedge.records.errors import ConfigError, RewardError, describe_error
from kedge.records.protocols import PendingReward, RewardInfo
from kedge.records.types import LEASES, REWARD_ERRORS, Metrics, RewardOutput, Rollout
from kedge.rewards.mixture import Mixture
from kedge.rewards.texts import TextCache, Texts, row_name

logger = logging.getLogger(__name__)

OnError = Literal["raise", "score", "drop"]
PER_ROW = ("prompts", "completions", "prompt_ids", "completion_ids")
FIXED = ("trainer_state", "log_metric", "log_extra")
LARGEST = 3.4e38  # scores are float32; a larger number would become infinite
PARALLEL = 16  # batches that an asynchronous function scores at the same time


class HungError(Exception):
    """A call did not return in time."""


class ExitError(Exception):
    """A call raised its cause, which is not an ``Exception``: a ``SystemExit``, for instance."""


def _result(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a call; whatever it raises except KeyboardInterrupt is an ``Exception``."""
    try:
        return call(*args, **kwargs)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ExitError from error


def _await(awaitable: Awaitable[Any]) -> Future[Any]:
    """Await on the event loop of rewards, which a ``SystemExit`` would end."""

    async def wait() -> Any:
        try:
            return await awaitable
        except SystemExit as error:
            raise ExitError from error

    return on_event_loop(wait(), name="rewards")


class RewardFunction:
    """Scores a response with a Python function, synchronous or asynchronous.

    The function is called once for all rows with those of the following keyword arguments that it
    accepts (all of them if it takes ``**kwargs``): ``prompts`` and ``completions`` (text, or chat
    messages if the dataset has chats), ``prompt_ids`` and ``completion_ids`` (token ids, including
    the stop token), every other dataset column by its name, ``environments`` (those of the finished
    episodes, after ``environment_factory`` the objects that it made), ``trainer_state``,
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
        timeout: seconds that a call may take.  A longer one is repeated with all rows at the same
            time, each in a thread; a row that takes as long again is dropped, or gets
            ``error_score``.  None: no limit.
        trainer_state: returns the value of the ``trainer_state`` argument.

    Raises:
        ConfigError: ``on_error`` cannot act.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        texts: TextCache,
        *,
        name: str | None = None,
        on_error: OnError = "raise",
        error_score: float | None = None,
        timeout: float | None = None,
        trainer_state: Callable[[], object] | None = None,
    ) -> None:
        scoreless = on_error == "score" and error_score is None
        if scoreless or on_error not in ("raise", "score", "drop"):
            raise ConfigError(
                f"on_error={on_error!r} with error_score={error_score!r} must be 'raise', 'drop',"
                " or 'score' with the score to give"
            )
        self.name = name or function_name(function)
        self._function, self._texts = function, texts
        self._signature = Signature(function, self.name)
        self._on_error, self._error_score, self._timeout = on_error, error_score, timeout
        self._state = trainer_state or (lambda: None)

    @property
    def info(self) -> RewardInfo:
        """What the function's signature and kind tell."""
        columns = self._signature.columns
        return RewardInfo(
            name=self.name,
            columns=columns,
            parallel=PARALLEL if is_async(self._function) else 1,
            reads_environments=columns is None or "environments" in columns,
            begin=self.begin,
        )

    def score(self, rollout: Rollout) -> RewardOutput:
        """One reward output for all rows; rows the function does not apply to are not valid.

        With what the function logged, and the number of failed rows as ``reward_errors/<name>``.
        """
        return Mixture([(self.name, self, 1.0)]).score(rollout)

    def begin(self, rollout: Rollout) -> PendingReward:
        """Start an asynchronous function; a synchronous one runs when the result is asked for."""
        texts, log = self._texts.of(rollout), RewardLog()
        fixed = dict(zip(FIXED, (self._state(), log.metric, log.extra), strict=True))
        kwargs = self._signature.arguments(texts, fixed)
        started = _await(self._function(**kwargs)) if is_async(self._function) else None
        return lambda: self._finish(texts, kwargs, log, started)

    def _finish(
        self, texts: Texts, kwargs: dict[str, Any], log: RewardLog, started: Future[Any] | None
    ) -> tuple[RewardOutput, Tensor]:
        count = len(texts.completion_ids)
        try:
            if started is None and self._timeout is None:
                returned = self._call(kwargs)
            else:
                started = started or in_thread(functools.partial(self._call, kwargs))
                returned = self._wait([started])[0]()
        except Exception as error:
            values = self._row_by_row(texts, kwargs, error)
        else:
            values = self._read(returned, texts, range(count))
        invalid = {row: value for row, value in enumerate(values) if isinstance(value, Invalid)}
        failed = torch.zeros(count, dtype=torch.bool)
        if invalid:
            wrong = [row for row, value in invalid.items() if not value.late]
            row = (wrong or [*invalid])[0]
            problem = self._error(texts, row, invalid[row].problem)
            if self._on_error == "raise" and wrong:
                raise problem
            log.metric(f"{REWARD_ERRORS}{self.name}", float(len(invalid)))
            action = "dropped" if self._on_error != "score" else f"scored {self._error_score}"
            logger.warning("%d rows %s: %s", len(invalid), action, problem)
            if self._on_error == "score":
                score = float(self._error_score or 0.0)
                values = [score if isinstance(value, Invalid) else value for value in values]
            else:
                failed[[*invalid]] = True
        output = self._to_output(texts.rollout, values)
        output = replace(output, metrics=log.metrics.totals, columns=log.extras(len(values)))
        return output, failed.to(texts.rollout.ids.device)

    def _call(self, kwargs: dict[str, Any]) -> Any:
        returned = _result(self._function, **kwargs)
        return _result(_await(returned).result) if inspect.isawaitable(returned) else returned

    def _wait(self, calls: Sequence[Future[Any]]) -> list[Callable[[], Any]]:
        """What returns the results of calls, or raises; of those that hang, a ``HungError``."""
        _, late = wait(calls, self._timeout)

        def result(call: Future[Any]) -> Any:
            if call not in late:
                return _result(call.result)
            call.cancel()
            raise HungError(f"did not return within {self._timeout:g} s (reward_timeout)")

        return [functools.partial(result, call) for call in calls]

    def _row_by_row(self, texts: Texts, kwargs: dict[str, Any], error: Exception) -> list[Value]:
        """Call the function once per row, after a call with all rows raised ``error``."""
        single = [one_row(kwargs, row) for row in range(len(texts.completion_ids))]
        calls: list[Callable[[], Any]] = [functools.partial(self._call, call) for call in single]
        if is_async(self._function):  # these start at once
            calls = self._wait([_await(self._function(**call)) for call in single])
        elif self._timeout is not None:
            calls = self._wait([in_thread(call) for call in calls])

        def value_of(row: int, call: Callable[[], Any]) -> Value:
            try:
                returned = call()
            except HungError as cause:
                return Invalid(str(cause), late=True)
            except Exception as cause:
                problem = f"raised {_describe(cause)}{_texts_hint(cause, texts)}"
                if self._on_error == "raise":
                    raise self._error(texts, row, problem) from cause
                return Invalid(problem)
            return self._read(returned, texts, [row])[0]

        values = [value_of(row, call) for row, call in enumerate(calls)]
        if any(isinstance(value, Invalid) for value in values):
            return values
        hung = isinstance(error, HungError)
        problem = (
            f"reward function {self.name} {error if hung else f'raised {_describe(error)}'} when"
            f" called with all {len(single)} rows, but not on any single row"
        )
        if self._on_error == "raise" and not hung:
            raise RewardError(f"{problem}; check what depends on the batch") from error
        logger.warning("%s; using the rewards of the single-row calls", problem)
        return values

    def _read(self, returned: Any, texts: Texts, rows: Sequence[int]) -> list[Value]:
        """Read the values that the function returned for some rows of a rollout.

        A list, tuple, array or tensor has for each row a number, None, or a number per response
        token; rows of a 2-D tensor may be as long as the padded responses.
        """
        entries = _plain(returned)
        if not isinstance(entries, (list, tuple)) or len(entries) != len(rows):
            got = len(entries) if isinstance(entries, (list, tuple)) else type(returned).__name__
            raise RewardError(
                f"reward function {self.name} must return a list with one number (or None) for each"
                f" of {len(rows)} completions, got {got}"
            )
        width = texts.rollout.ids.shape[1] if getattr(returned, "ndim", 1) == 2 else None
        lengths = [len(texts.completion_ids[row]) for row in rows]
        return [read_value(*pair, width) for pair in zip(entries, lengths, strict=True)]

    def _to_output(self, rollout: Rollout, values: list[Value]) -> RewardOutput:
        scores = torch.zeros(len(values), dtype=torch.float64)
        component = torch.full((len(values),), torch.nan)
        dense, mask = torch.zeros(rollout.ids.shape, dtype=torch.float64), rollout.loss_mask.cpu()
        for row, value in enumerate(values):
            if isinstance(value, float):
                scores[row] = component[row] = value
            elif isinstance(value, list):
                component[row] = sum(value)
                dense[row, mask[row]] = torch.tensor(value, dtype=torch.float64)
        some_dense = any(isinstance(value, list) for value in values)
        return RewardOutput(
            scores=scores,
            valid=torch.tensor([isinstance(value, (float, list)) for value in values]),
            components={self.name: component},
            token_rewards=dense if some_dense else None,
        ).to(rollout.ids.device)

    def _error(self, texts: Texts, row: int, problem: str) -> RewardError:
        where = row_name(texts.rollout, row, texts.prompts[row])
        return RewardError(
            f"reward function {self.name} {problem}, on {where}; fix it, or choose"
            " on_reward_error='score' or 'drop'"
        )


@dataclass(frozen=True, slots=True)
class Invalid:
    """The problem with a value that a function returned for a row; ``late``: it did not return."""

    problem: str
    late: bool = False


Value = float | list[float] | Invalid | None  # score, score per token, or None: does not apply


def read_value(entry: Any, length: int, width: int | None) -> Value:
    """Read one entry, for a response of ``length`` tokens; ``width``: its length if padded."""
    try:
        return _read_numbers(entry, length, width)
    except Exception as error:  # an object may raise when it is compared or printed
        kind = type(entry).__name__
        return Invalid(f"returned a {kind} that raises {describe_error(error)}; return a number")


def _read_numbers(entry: Any, length: int, width: int | None) -> Value:
    plain = _plain(entry)
    if plain is None:
        return None
    per_token = isinstance(plain, (list, tuple))
    numbers = plain if per_token else [plain]
    if per_token and len(numbers) == width:
        numbers = numbers[:length]
    if per_token and len(numbers) != length:
        return Invalid(f"returned {len(numbers)} per-token rewards for {length} response tokens")
    for number in numbers:
        if not (isinstance(number, Real) and -LARGEST <= number <= LARGEST):  # type: ignore[operator]
            kind = f"{'the per-token reward ' * per_token}{type(number).__name__}"
            try:
                value = str(number)[:80]
            except ValueError:  # Python prints no integer of more than 4,300 digits
                value = "of thousands of digits"
            return Invalid(
                f"returned {kind} {value}, which is not a finite float32; return None"
                " where the reward does not apply"
            )
    return [float(number) for number in numbers] if per_token else float(plain)


def _plain(returned: Any) -> Any:
    """Convert arrays and tensors to lists and numbers; anything else is unchanged."""
    return returned.tolist() if hasattr(returned, "tolist") else returned


def _describe(error: BaseException) -> str:
    """As ``describe_error``, without a colon where there is no message."""
    if isinstance(error, ExitError) and error.__cause__ is not None:
        error = error.__cause__
    return describe_error(error).removesuffix(": ")


def _texts_hint(error: BaseException, texts: Texts) -> str:
    """What a function for chats has missed, if it read a text as messages."""
    reads_messages = isinstance(error, TypeError) and "string ind" in str(error)
    if reads_messages and isinstance(next(iter(texts.completions), None), str):
        return " (completions are texts here, not messages, since the prompts are texts)"
    return ""


def function_name(function: Callable[..., Any]) -> str:
    """Short name of a function, of the function in a partial, or of a callable's class."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` returns a coroutine without doing any work."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


class Signature:
    """The keyword arguments that a function accepts, of which ``fixed`` are no columns."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        fixed: Collection[str] = FIXED,
        kind: str = "reward function",
    ) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._name, self._given = f"{kind} {name}", [*PER_ROW, *fixed]
        self._all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._named = {p.name for p in named}
        self._required = {p.name for p in named if p.default is p.empty}

    @property
    def columns(self) -> frozenset[str] | None:
        """Dataset columns that the function may read; None: any."""
        return None if self._all else frozenset(self._named - {*self._given})

    def check(self, columns: Collection[str]) -> None:
        """Reject a dataset that lacks a column the function requires."""
        missing = sorted(self._required - {*self._given} - ({*columns} - {"prompt"}))
        if not missing:
            return
        plural = f"{missing[0]}s"
        fix = f"add a dataset column {missing[0]!r}, or give the argument a default"
        fix = f"use {plural}, a list, instead" if plural in PER_ROW else fix
        raise ConfigError(
            f"{self._name} needs {', '.join(missing)}, and the dataset has no such"
            f" column (its columns: {', '.join(sorted(columns)) or 'none'}). In addition to"
            f" columns, a function can take {', '.join(self._given)}; {fix}"
        )

    def arguments(self, texts: Texts, fixed: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of one call over all rows of a rollout."""
        reserved = {"prompt", *self._given}  # dataset columns cannot replace these arguments
        columns = texts.rollout.prompts.columns.items()
        values = {**fixed} | {
            name: list(column) for name, column in columns if name not in reserved
        }
        episodes = texts.rollout.episodes
        leases = [] if episodes is None else episodes.columns.get(LEASES, [])
        if leases and None not in leases:  # None: they are in another process
            values["environments"] = [lease.environment for lease in leases]
            released = [row for row, lease in enumerate(leases) if lease.released]
            if released and (self._all or "environments" in self._named):
                row = row_name(texts.rollout, released[0], texts.prompts[released[0]])
                raise RewardError(
                    f"{self._name} would read the environment of {row}, which was"
                    " released and may play another episode by now: sample the rollout again"
                )
        offered = [*PER_ROW, *values]
        missing = self._required - set(offered)
        if missing:
            raise RewardError(
                f"{self._name} requires {', '.join(sorted(missing))}, which is"
                " neither a dataset column nor one of Kedge's arguments; available:"
                f" {', '.join(sorted(offered))}"
            )
        names = [name for name in offered if self._all or name in self._named]
        return {n: values[n] if n in values else list(getattr(texts, n)) for n in names}


def one_row(kwargs: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The same arguments for a single row, whose call cannot log."""
    single = {k: v[row : row + 1] if isinstance(v, list) else v for k, v in kwargs.items()}
    silent = {"log_metric": RewardLog().metric, "log_extra": RewardLog().extra}
    return single | {name: silent[name] for name in silent.keys() & single.keys()}


class RewardLog:
    """Collects what a function passes to ``log_metric`` and ``log_extra`` in one call."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self._extras: dict[str, list[object]] = {}

    def metric(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add one observation of ``name``, or the mean of ``weight`` of them; logs the mean."""
        if not isinstance(name, str):
            raise RewardError(
                f"log_metric(name, value) needs a text as its name, got {name!r} of type"
                f" {type(name).__name__}"
            )
        sums = {name: (float(value) * weight, float(weight))}
        self.metrics = self.metrics.merge(Metrics(sums))

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Set a column of the completions table, one value per row."""
        if not isinstance(column, str):
            raise RewardError(
                f"log_extra(column, values) needs a text as its column, got {column!r} of type"
                f" {type(column).__name__}"
            )
        self._extras[column] = list(values)

    def extras(self, rows: int) -> dict[str, list[object]]:
        """The columns, if each has one value per row."""
        for name, values in self._extras.items():
            if len(values) != rows:
                raise RewardError(
                    f"log_extra({name!r}, ...) must get one value per completion: got"
                    f" {len(values)} for {rows} completions"
                )
        return self._extras
