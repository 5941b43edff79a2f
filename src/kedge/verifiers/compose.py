"""Verifiers selected by a dataset column."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kedge import plugins
from kedge.records.errors import ConfigError, RewardError
from kedge.suggestions import hint
from kedge.verifiers import texts
from kedge.verifiers.base import Verifier, read_column, read_scores
from kedge.verifiers.mathematics import math as math_answers
from kedge.verifiers.numbers import gsm8k

logger = logging.getLogger(__name__)
RewardFunc = Callable[..., Sequence[float | None]]
REPORTS = ("log_metric", "log_extra", "trainer_state")


class ByColumn:
    """A reward function that routes every row to the verifier it names.

    A row names one verifier, or several with a list of equally many ground truths; their weighted
    scores are summed.  A row with None instead of a name gets None.  An unknown name raises.

    It logs ``<verifier>_reward`` and ``<verifier>_correct_rate`` (share of scores above 0) for
    every verifier in use, and ``verifiable_correct_rate`` over all rows.

    Args:
        verifiers: reward functions by name.
        column: dataset column with the verifier names.
        truth: dataset column with the ground truths; it replaces each verifier's default column.
        weights: weights of verifiers by name; default 1.
        rename: aliases, {name in the dataset: name in ``verifiers``}.
        name: reward source in the reward output.

    Raises:
        ConfigError: no verifier, one that is not a synchronous function, or an unknown name in
            ``weights`` or ``rename``.
    """

    def __init__(
        self,
        verifiers: Mapping[str, RewardFunc],
        *,
        column: str = "dataset",
        truth: str = "ground_truth",
        weights: Mapping[str, float] | None = None,
        rename: Mapping[str, str] | None = None,
        name: str = "verifiable",
    ) -> None:
        self.__name__, self.column, self.truth = name, column, truth
        self.verifiers, self.weights = dict(verifiers), dict(weights or {})
        self.rename = dict(rename or {})
        if not self.verifiers:
            raise ConfigError("verifiers must not be empty; pass {'name': function}")
        for key, function in self.verifiers.items():
            if not callable(function) or inspect.iscoroutinefunction(function):
                raise ConfigError(f"verifier {key!r} must be a synchronous function")
        for key in (*self.weights, *self.rename.values()):
            if key not in self.verifiers:
                raise ConfigError(self._unknown(key, "weights or rename"))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score all rows; raises RewardError for an unknown verifier."""
        rows = len(completions)
        names = read_column(columns, self.column, rows, self.__name__)
        truths = read_column(columns, self.truth, rows, self.__name__)
        jobs: dict[str, list[tuple[int, Any]]] = {}
        for row, (value, truth) in enumerate(zip(names, truths, strict=True)):
            known = self._read_names(value, f"row {row}" if rows > 1 else "a row")
            own_truths = truth if isinstance(value, (list, tuple)) else [truth] * len(known)
            if not isinstance(own_truths, (list, tuple)) or len(own_truths) != len(known):
                raise RewardError(
                    f"{self.__name__}: a row names {len(known)} verifiers in {self.column!r}, so"
                    f" {self.truth!r} must be a list of {len(known)} ground truths"
                )
            for name, own_truth in zip(known, own_truths, strict=True):
                jobs.setdefault(name, []).append((row, own_truth))
        scores: list[float | None] = [None] * rows
        log = columns.get("log_metric")
        for name, job in jobs.items():
            job_scores = self._score(name, job, {**columns, "completions": completions}, rows)
            for (row, _), score in zip(job, job_scores, strict=True):
                if score is not None:
                    scores[row] = (scores[row] or 0.0) + self.weights.get(name, 1.0) * score
            _report(log, name, job_scores)
        _report(log, self.__name__, scores)
        return scores

    def check(self, names: Iterable[Any]) -> None:
        """Validate the names in a dataset before training, and prepare those verifiers.

        Args:
            names: the values of ``column``.

        Raises:
            RewardError: a name is unknown.
            ConfigError: a verifier cannot run on this machine.
        """
        used: set[str] = set()
        for row, value in enumerate(names):
            used.update(self._read_names(value, f"row {row}"))
        for name in sorted(used):
            verifier = self.verifiers[name]
            if isinstance(verifier, Verifier):
                verifier.prepare()

    def _read_names(self, value: Any, where: str) -> list[str]:
        """Read the verifiers that a row names: None, a name, or several."""
        if value is None:
            return []
        known = []
        for name in value if isinstance(value, (list, tuple)) else [value]:
            alias = self.rename.get(name, name) if isinstance(name, str) else ""
            choices = (alias, alias.lower())  # datasets write names like GSM8K and MATH
            found = next((choice for choice in choices if choice in self.verifiers), None)
            if found is None:
                raise RewardError(self._unknown(name, where))
            known.append(found)
        return known

    def _unknown(self, name: Any, where: str) -> str:
        return (
            f"{self.__name__}: unknown verifier {name!r} in {where}"
            f"{hint(str(name), self.verifiers)} (known: {', '.join(self.verifiers)}; add yours with"
            f" ByColumn({{..., {str(name)!r}: function}}) or map the name with rename)"
        )

    def _score(
        self, name: str, job: list[tuple[int, Any]], columns: dict[str, Any], rows: int
    ) -> list[float | None]:
        function = self.verifiers[name]
        chosen = {
            key: [value[row] for row, _ in job]
            for key, value in columns.items()
            if isinstance(value, (list, tuple)) and len(value) == rows
        }
        truths = [truth for _, truth in job]
        chosen |= {self.truth: truths, getattr(function, "column", None) or self.truth: truths}
        chosen |= {key: columns[key] for key in REPORTS if key in columns and key != "log_extra"}
        returned = function(**accepted_arguments(function, chosen))
        try:
            return read_scores(returned, len(job))
        except ValueError as error:
            raise RewardError(f"verifier {name} {error}") from error


def accepted_arguments(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a function accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    return {p.name: offered[p.name] for p in parameters if p.name in offered}


def _report(
    log: Callable[[str, float, float], None] | None, name: str, scores: list[float | None]
) -> None:
    known = [score for score in scores if score is not None]
    if log is not None and known:
        rows = len(known)
        log(f"{name}_reward", sum(known) / rows, rows)
        log(f"{name}_correct_rate", sum(score > 0 for score in known) / rows, rows)


_CORE: dict[str, RewardFunc] = {
    "gsm8k": gsm8k,
    "math": math_answers,
    "regex": texts.regex_match,
    "string_match": texts.string_match,
    "exact_match": texts.exact_match,
    "string_contains": texts.string_contains,
    "string_f1": texts.string_f1,
}


def known_verifiers() -> dict[str, RewardFunc]:
    """All verifiers by name: Kedge's, and those of entry points in ``kedge.rewards``."""
    found = dict(_CORE)
    for name in plugins.find("kedge.rewards"):
        try:
            function = plugins.load("kedge.rewards", name)
        except ConfigError as error:  # rows that do not name it can be scored
            logger.warning("%s", error)
            continue
        if function is not None:
            found[name] = function
    return found


def by_column(verifiers: Mapping[str, RewardFunc] | None = None, **options: Any) -> ByColumn:
    """Select verifiers, built-in or your own, by a dataset column.

    Args:
        verifiers: additional verifiers, or replacements under the same names.
        options: options of ``ByColumn``: column, truth, weights, rename, name.
    """
    return ByColumn(known_verifiers() | dict(verifiers or {}), **options)
