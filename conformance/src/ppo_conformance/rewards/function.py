"""A reward function of any convention, called with rows and answers."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWERS = ("ground_truth", "answer", "solution", "target", "label", "gold", "reference")
Row = dict[str, Any]


class TooSlow(Exception):
    """A call did not end in time."""


@dataclass
class Reward:
    """A reward function.

    Args:
        function: of one of the conventions.
        convention: "trl": f(completions, **columns) -> numbers; "kedge": the same; "verl":
            f(data_source, solution_str, ground_truth, extra_info) -> number or {"score": number}.
        answer: column of the right answer, "" if there is none.
        limit: seconds that a call may take.
    """

    function: Callable[..., Any]
    convention: str
    answer: str
    limit: float = 5.0

    def __call__(self, rows: Sequence[Row], texts: Sequence[str]) -> list[float | None]:
        """Scores of the answers ``texts`` to ``rows``."""
        with _alarm(self.limit):
            if self.convention == "verl":
                return [self._verl(row, text) for row, text in zip(rows, texts, strict=True)]
            return _numbers(self.function(**self.arguments(rows, texts)), len(rows))

    def arguments(self, rows: Sequence[Row], texts: Sequence[str]) -> dict[str, Any]:
        """The arguments of TRL's convention, as far as the function takes them."""
        prompts = [copy.deepcopy(row.get("prompt", "")) for row in rows]
        chat = bool(rows) and isinstance(rows[0].get("prompt"), list)
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        known: dict[str, Any] = {
            "prompts": prompts,
            "completions": messages if chat else list(texts),
            "completion_ids": [[hash(word) % 50000 for word in text.split()] for text in texts],
            "trainer_state": None,
            "log_metric": lambda *_: None,
            "log_extra": lambda *_: None,
        }
        columns = {key for row in rows for key in row} - {"prompt", "completion"}
        known |= {key: [copy.deepcopy(row.get(key)) for row in rows] for key in columns}
        parameters = inspect.signature(self.function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return known
        return {p.name: known[p.name] for p in parameters if p.name in known}

    def _verl(self, row: Row, text: str) -> float:
        known = {
            "data_source": row.get("data_source", "test"),
            "solution_str": text,
            "ground_truth": copy.deepcopy(row.get(self.answer)),
            "extra_info": copy.deepcopy(row.get("extra_info") or {}),
        }
        parameters = inspect.signature(self.function).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            known = {p.name: known[p.name] for p in parameters if p.name in known}
        score = self.function(**known)
        return _numbers([score["score"] if isinstance(score, dict) else score], 1)[0] or 0.0


def _numbers(returned: Any, rows: int) -> list[float | None]:
    scores = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(scores, list | tuple) or len(scores) != rows:
        raise ValueError(f"returned {str(returned)[:60]!r} for {rows} answers, not {rows} numbers")
    out = []
    for score in scores:
        value = None if score is None else float(score)
        if value is not None and not abs(value) < float("inf"):
            raise ValueError(f"returned {value}, not a finite number")
        out.append(value)
    return out


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """End the block by TooSlow; only in the main thread of a Unix process."""
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not usable:
        yield
        return

    def stop(*_: Any) -> None:
        raise TooSlow(f"did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def load_function(spec: str) -> Callable[..., Any]:
    """The function of ``FILE.py:NAME`` or ``package.module:NAME``."""
    place, _, name = spec.rpartition(":")
    if not place:
        raise ValueError(f"{spec!r} must be FILE:FUNCTION or module:FUNCTION")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise FileNotFoundError(f"{place}: no such file")
        found = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}")
    return function


def convention_of(function: Callable[..., Any]) -> str:
    """By the names of its arguments."""
    names = set(inspect.signature(function).parameters)
    return "verl" if "solution_str" in names else "trl"


def read_rows(path: str, limit: int) -> list[Row]:
    """The first rows of a JSON Lines file."""
    rows = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        if line.strip() and len(rows) < limit:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a row must be an object")
            rows.append(row)
    if len(rows) < 2:
        raise ValueError(f"{path} must have at least two rows, with different answers")
    return rows


def answer_column(rows: list[Row], asked: str | None) -> str:
    """The column of the right answer: as asked, or by its usual names; "" if there is none."""
    if asked is not None and asked not in rows[0]:
        raise ValueError(f"there is no column {asked!r}; the rows have {sorted(rows[0])}")
    return asked or next((name for name in ANSWERS if name in rows[0]), "")
