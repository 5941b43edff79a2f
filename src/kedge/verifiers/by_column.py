"""Scores each row with the verifier that a dataset column names."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kedge.errors import ConfigError, RewardError
from kedge.verifiers.base import Verifier, read_column

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
        for row, (names_of_row, truth) in enumerate(zip(names, truths, strict=True)):
            for name, truth_of_name in self._verifiers_of(
                f"row {row}" if rows > 1 else "a row", names_of_row, truth
            ):
                jobs.setdefault(name, []).append((row, truth_of_name))
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
        for row, names_of_row in enumerate(names):
            several = isinstance(names_of_row, (list, tuple))
            known = self._verifiers_of(
                f"row {row}", names_of_row, [None] * len(names_of_row) if several else None
            )
            used.update(name for name, _ in known)
        for name in sorted(used):
            verifier = self.verifiers[name]
            if isinstance(verifier, Verifier):
                verifier.prepare()

    def _verifiers_of(self, row: str, names_of_row: Any, truth: Any) -> list[tuple[str, Any]]:
        if names_of_row is None:
            return []
        several = isinstance(names_of_row, (list, tuple))
        names = list(names_of_row) if several else [names_of_row]
        truths = truth if several else [truth]
        if not isinstance(truths, (list, tuple)) or len(truths) != len(names):
            raise RewardError(
                f"{self.__name__}: {row} names {len(names)} verifiers in {self.column!r}, so"
                f" {self.truth!r} must be a list of {len(names)} ground truths"
            )
        known = []
        for name in names:
            known_name = self.rename.get(name, name) if isinstance(name, str) else name
            if isinstance(known_name, str) and known_name not in self.verifiers:
                known_name = known_name.lower()  # datasets write GSM8K and MATH
            if not isinstance(known_name, str) or known_name not in self.verifiers:
                raise RewardError(self._unknown(known_name, row))
            known.append(known_name)
        return list(zip(known, truths, strict=True))

    def _unknown(self, name: Any, where: str) -> str:
        near = difflib.get_close_matches(str(name), self.verifiers, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return (
            f"{self.__name__}: unknown verifier {name!r} in {where}{hint} (known:"
            f" {', '.join(self.verifiers)}; add yours with ByColumn({{..., {str(name)!r}:"
            " function}) or map the name with rename)"
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
        scores = list(function(**accepted(function, chosen)))
        if len(scores) != len(job):
            raise RewardError(
                f"verifier {name} returned {len(scores)} scores for {len(job)} completions"
            )
        for score in scores:
            if score is not None and not math.isfinite(score):
                raise RewardError(f"verifier {name} returned {score}, not a finite number")
        return scores


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
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
