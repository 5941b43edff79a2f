"""Each row of the dataset names the verifier that judges it."""

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
    """A reward function that passes every row on to the verifier it names.

    A row names one verifier, or a list of them with a list of as many ground truths; the scores of
    several add up, each times its weight.  A row that names none (None) gets None.  A name that is
    not known is an error, never a score.

    It logs ``<verifier>_reward`` and ``<verifier>_correct_rate`` (share of scores above 0) for
    every verifier that was used, and ``verifiable_correct_rate`` for all rows together.

    Args:
        verifiers: reward functions by name.
        column: dataset column with the name.
        truth: dataset column with the ground truth; a verifier finds its own there, whatever column
            it would read by itself.
        weights: of verifiers by name; 1 where nothing is said.
        rename: other names for verifiers, {name in the dataset: name here}.
        name: of the part in the judgement.

    Raises:
        ConfigError: there is no verifier, one cannot be called, or an option names none of them.
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
            raise ConfigError("there is no verifier; give {'name': function}")
        for own, function in self.verifiers.items():
            if not callable(function) or inspect.iscoroutinefunction(function):
                raise ConfigError(f"verifier {own!r} must be a synchronous function")
        for own in (*self.weights, *self.rename.values()):
            if own not in self.verifiers:
                raise ConfigError(self._unknown(own, "the options"))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score all rows.

        Raises:
            RewardError: a row names no known verifier, or has not as many ground truths as names.
        """
        rows = len(completions)
        names = read_column(columns, self.column, rows, self.__name__)
        truths = read_column(columns, self.truth, rows, self.__name__)
        jobs: dict[str, list[tuple[int, Any]]] = {}
        for row, (given, truth) in enumerate(zip(names, truths, strict=True)):
            for name, own in self._named(f"row {row}" if rows > 1 else "a row", given, truth):
                jobs.setdefault(name, []).append((row, own))
        scores: list[float | None] = [None] * rows
        log = columns.get("log_metric")
        for name, job in jobs.items():
            found = self._judge(name, job, {**columns, "completions": completions}, rows)
            for (row, _), score in zip(job, found, strict=True):
                if score is not None:
                    scores[row] = (scores[row] or 0.0) + self.weights.get(name, 1.0) * score
            _report(log, name, found)
        _report(log, self.__name__, scores)
        return scores

    def check(self, names: Iterable[Any]) -> None:
        """Look through the names in a dataset before training, and prepare those verifiers.

        Args:
            names: the values of the column.

        Raises:
            RewardError: one is not known.
            ConfigError: one cannot run on this machine.
        """
        used: set[str] = set()
        for row, given in enumerate(names):
            several = isinstance(given, (list, tuple))
            known = self._named(f"row {row}", given, [None] * len(given) if several else None)
            used.update(name for name, _ in known)
        for name in sorted(used):
            verifier = self.verifiers[name]
            if isinstance(verifier, Verifier):
                verifier.prepare()

    def _named(self, row: str, given: Any, truth: Any) -> list[tuple[str, Any]]:
        if given is None:
            return []
        several = isinstance(given, (list, tuple))
        names = list(given) if several else [given]
        truths = truth if several else [truth]
        if not isinstance(truths, (list, tuple)) or len(truths) != len(names):
            raise RewardError(
                f"{self.__name__}: {row} names {len(names)} verifiers in {self.column!r}, so"
                f" {self.truth!r} must be a list of {len(names)} ground truths"
            )
        known = []
        for name in names:
            own = self.rename.get(name, name) if isinstance(name, str) else name
            if isinstance(own, str) and own not in self.verifiers:
                own = own.lower()  # datasets write GSM8K and MATH
            if not isinstance(own, str) or own not in self.verifiers:
                raise RewardError(self._unknown(own, row))
            known.append(own)
        return list(zip(known, truths, strict=True))

    def _unknown(self, name: Any, where: str) -> str:
        near = difflib.get_close_matches(str(name), self.verifiers, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return (
            f"{self.__name__}: {where} names the verifier {name!r}, which is not known{hint} (there"
            f" are {', '.join(self.verifiers)}; others: ByColumn({{..., {str(name)!r}: function}})"
            " or rename)"
        )

    def _judge(
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
        found = list(function(**accepted(function, chosen)))
        if len(found) != len(job):
            raise RewardError(
                f"verifier {name} returned {len(found)} scores for {len(job)} completions"
            )
        for score in found:
            if score is not None and not math.isfinite(score):
                raise RewardError(f"verifier {name} returned {score}, not a finite number")
        return found


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that a function takes."""
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
