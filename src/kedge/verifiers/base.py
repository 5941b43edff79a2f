"""The base class of verifiers, and what they share: texts, final answers, columns and scores."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kedge.records.errors import RewardError

Check = Callable[[str, Any], float]
_PHRASE = re.compile(
    r"\b(?:answer|result|solution)\s{0,3}(?:is|are|equals|=|:)[\s:*]{0,5}(?:equal\s{1,3}to\b)?",
    re.IGNORECASE,
)
_BRACES = re.compile(r"\\f?boxed\s{0,5}\{|\\[{}\\]|[{}]")
_BARE_BOX = re.compile(r"\\f?boxed\s{1,5}([^\s{}$]{1,50})")
_HASHES = re.compile(r"####[ #]*([^\n]+)")
_HEADING = re.compile(r"[^0-9A-Za-z\\]*[A-Za-z]")


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


def conclusion(text: str) -> str:
    """What a response says after its reasoning, the last ``</think>``; without one, all of it.

    An answer that stands in the reasoning alone was considered, not given.
    """
    return text.rsplit("</think>", 1)[-1]


def marked_answer(text: str) -> str | None:
    r"""The content of the last explicit answer mark in a response, or None without a mark.

    Marks are ``\boxed{...}`` (and ``\fbox``), ``<answer>...</answer>``, and ``#### ...`` to the
    end of the line (unless a word follows: that is a heading).  Of nested marks the innermost
    counts.  A mark that is never closed is ignored.
    """
    marks = [m for m in (_last_box(text), _last_tag(text), _last_hashes(text)) if m is not None]
    return max(marks)[1] if marks else None


def stated_answer(text: str) -> str | None:
    """The text after the last "the answer is" (or result, solution), to the end of the line."""
    ends = [match.end() for match in _PHRASE.finditer(text)]
    return text[ends[-1] :].split("\n", 1)[0].strip() or None if ends else None


def _last_box(text: str) -> tuple[int, str] | None:
    text = text.replace("\\fbox", "\\fboxed")
    last: tuple[int, int, int] | None = None
    open_braces: list[tuple[int, int] | None] = []  # start of each box, and of its content
    for token in _BRACES.finditer(text):
        if token[0] == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                last = max(last or (-1, 0, 0), (*box, token.start()))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0].endswith("{") and len(token[0]) > 2:
            open_braces.append(token.span())
    answer = None if last is None else (last[0], text[last[1] : last[2]].strip())
    for bare in _BARE_BOX.finditer(text, last[0] if last else 0):
        answer = bare.start(), bare[1].rstrip(".,;")
    return answer


def _last_tag(text: str) -> tuple[int, str] | None:
    close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(close, 0))
    return None if start < 0 else (start, text[start + len("<answer>") : close].strip())


def _last_hashes(text: str) -> tuple[int, str] | None:
    marks = [(m.start(), m[1].strip()) for m in _HASHES.finditer(text) if not _HEADING.match(m[1])]
    return marks[-1] if marks and marks[-1][1] else None


def read_scores(returned: Any, rows: int) -> list[float | None]:
    """Read one finite number or None per row from the result of a reward function or server.

    A ValueError says what is wrong; put the name of the function or server before its message.
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
