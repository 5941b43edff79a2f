"""The verifier base class: a reward function that compares each response with its ground truth."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kedge.errors import RewardError

Check = Callable[[str, Any], float]


class Unanswered(Exception):
    """A response that could not be checked; ``kind`` is the metric that counts it: ``timeouts``."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail or kind)
        self.kind = kind


class Verifier:
    """A reward function made of one comparison, ``check(response, ground_truth)``.

    It returns one number per row, and None for a row whose ground truth is None.  No response makes
    it raise: a response that cannot be checked scores 0 and is counted in the metric
    ``<kind>/<name>``, for example ``timeouts/math`` (rows per call).  An invalid ground truth is a
    mistake in the dataset and raises.

    Args:
        check: scores one response; raises RewardError for an invalid ground truth (the verifier's
            name is added to its message) and Unanswered for a response that cannot be checked.
        name: reward source in the reward output, and suffix of the metrics.
        column: dataset column with the ground truth; None if the check needs none.
        threads: responses checked concurrently.
        prepare: called before training; raises if the check cannot run on this machine.
    """

    def __init__(
        self,
        check: Check,
        *,
        name: str,
        column: str | None = "ground_truth",
        threads: int = 1,
        prepare: Callable[[], object] = object,
    ) -> None:
        self.check, self.__name__ = check, name
        self.column, self.threads, self.prepare = column, threads, prepare

    def __repr__(self) -> str:
        return f"Verifier({self.__name__!r}, column={self.column!r})"

    def on(self, column: str) -> Verifier:
        """A copy of the verifier that reads the ground truth from another column."""
        other = copy.copy(self)
        other.column = column
        return other

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score all rows.

        Args:
            completions: one text or list of chat messages per row.
            columns: dataset columns and the other arguments of reward functions.

        Raises:
            RewardError: the column is missing, or a ground truth is invalid.
        """
        name = self.__name__
        truths = [None] * len(completions)
        if self.column is not None:
            truths = read_column(columns, self.column, len(completions), name)
        texts = [text_of(completion) for completion in completions]
        rows = [i for i, t in enumerate(truths) if t is not None or self.column is None]
        problems: Counter[str] = Counter()

        def score_row(row: int) -> float:
            try:
                return float(self.check(texts[row], truths[row]))
            except Unanswered as problem:
                problems[problem.kind] += 1
                return 0.0
            except RewardError as error:
                raise RewardError(f"verifier {name}: {error}") from error

        scores: list[float | None] = [None] * len(completions)
        for row, score in zip(rows, map_parallel(score_row, rows, self.threads), strict=True):
            scores[row] = score
        log = columns.get("log_metric")
        if log is not None:
            for kind, count in sorted(problems.items()):
                log(f"{kind}/{name}", float(count))
        return scores


def map_parallel(function: Callable[[Any], Any], items: Sequence[Any], threads: int) -> list[Any]:
    """``[function(item) for item in items]`` in parallel threads; raises the first error."""
    if threads <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), "kedge-verify") as pool:
        return list(pool.map(function, items))


def text_of(completion: Any) -> str:
    """The text of a completion: a string, or the content of its assistant messages."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Mapping):
        completion = [completion]
    if isinstance(completion, Sequence) and all(isinstance(m, Mapping) for m in completion):
        replies = [m for m in completion if m.get("role", "assistant") == "assistant"]
        return "\n".join(_content(message.get("content")) for message in replies)
    raise RewardError(
        "verifiers expect completions as text or chat messages, got"
        f" {type(completion).__name__}: {str(completion)[:80]!r}"
    )


def _content(content: Any) -> str:
    if content is None:  # a message that only calls a tool
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def read_scores(returned: Any, rows: int) -> list[float | None]:
    """Read one finite number or None per row from the result of a reward function or server.

    Raises:
        ValueError: anything else; prepend the name of the function or server to the message.
    """
    scores = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(scores, (list, tuple)):
        raise ValueError(f"returned {str(scores)[:80]!r}, not a list of {rows} rewards")
    if len(scores) != rows:
        raise ValueError(f"returned {len(scores)} rewards for {rows} completions")
    numbers = [score.item() if hasattr(score, "item") else score for score in scores]
    for x in numbers:  # integers may exceed the range of floats
        if x is not None and not (isinstance(x, (int, float)) and abs(x) <= sys.float_info.max):
            raise ValueError(f"returned {str(x)[:80]}, not a finite number or null")
    return [None if x is None else float(x) for x in numbers]


def read_column(columns: Mapping[str, Any], column: str, rows: int, name: str) -> list[Any]:
    """The values of a dataset column, one per row."""
    if column not in columns:
        known = [key for key, value in columns.items() if isinstance(value, list)]
        raise RewardError(
            f"verifier {name} needs the dataset column {column!r}; available columns:"
            f" {', '.join(sorted(known)) or 'none'} (choose another with verifier.on('...'))"
        )
    values = list(columns[column])
    if len(values) != rows:
        raise RewardError(
            f"{name}: column {column!r} has {len(values)} values for {rows} completions"
        )
    return values


def read_record(truth: Any, example: str) -> dict[str, Any]:
    """Read a ground truth given as mapping or JSON object; drops keys with value None."""
    value = truth
    if isinstance(truth, str):
        try:
            value = json.loads(truth)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise RewardError(
            f"the ground truth must be a mapping or a JSON object such as {example}, got"
            f" {str(truth)[:80]!r}"
        )
    return {key: entry for key, entry in value.items() if entry is not None}
