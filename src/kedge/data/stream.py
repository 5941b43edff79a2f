"""Prompts of each training step from a stream, a dataset without row numbers."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from kedge.data.encode import EncodedPrompts, Table, read_table
from kedge.data.prompts import DatasetPrompts
from kedge.records.errors import DataError, describe_error
from kedge.records.types import PromptBatch

logger = logging.getLogger(__name__)
KEPT = 64  # batches in memory; an earlier one is read again from the beginning
CHECKED = 8  # batches before a checkpoint that show whether a state leads to the same place
MOST_DROPPED = 100_000  # rows in a row that are too long
MOST_EVAL_ROWS = 100_000


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is a ``datasets.IterableDataset``, or else can only be iterated over."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and not indexed and not isinstance(dataset, type)


def read_stream(stream: Any) -> Any:
    """All rows of a stream that ends."""
    rows = _Rows(getattr(stream, "features", None))
    for row in stream:
        if len(rows) == MOST_EVAL_ROWS:
            raise DataError(
                f"eval_dataset is a stream of more than {MOST_EVAL_ROWS} rows; pass a part of it,"
                " such as stream.take(500)"
            )
        rows.append(row)
    return rows


class _Rows(list[Any]):
    """Rows with the features of their stream, which tell the keys that Arrow adds to dicts."""

    def __init__(self, features: Any, rows: Any = ()) -> None:
        super().__init__(rows)
        self.features = features


@dataclass(frozen=True, slots=True)
class _Batch:
    """The prompts of one step, and where its first row is in the stream."""

    table: Table
    prompts: EncodedPrompts
    turn: int  # passes before this one
    state: str | None  # the stream's state in JSON; None: it has none

    def digest(self) -> str:
        rows = self.table.take(range(len(self.table)), self.table.names)
        digest = hashlib.blake2b(repr(sorted(rows.items())).encode(), digest_size=8)
        digest.update(self.prompts.tokens.numpy().tobytes())
        return digest.hexdigest()


class StreamPrompts(DatasetPrompts):
    """Prompts drawn from a stream in its order, pass after pass; every rank reads all of it.

    Every batch is a pure function of the step, as of other prompts: what is no longer in memory is
    read again from the beginning.  Where the stream has a state, a resumed run goes on from there,
    and the batches before it show whether it led to the same place.  Each pass calls
    ``set_epoch(pass)``, if there is one, so that a shuffled stream is shuffled again.  Columns,
    lengths and tokens that are checked before training are those of the first batch.
    """

    _vocabulary: int | None = None

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def _read(self, dataset: Any) -> tuple[Table, EncodedPrompts]:
        self._reader = _Reader(dataset, self._encode, self._per_step, self._drop_above)
        first = self._reader.batch(0)
        return first.table, first.prompts

    def batch(self, step: int) -> PromptBatch:
        """This rank's rows of training step ``step`` (0 is the first)."""
        part, found = copy.copy(self), self._reader.batch(step)
        part._table, part._prompts = found.table, found.prompts
        if self._vocabulary is not None:
            part.check_tokens(self._vocabulary)
        return part._batch_of(torch.arange(self._per_step))

    def check_tokens(self, known: int) -> None:
        """Reject prompts with token ids of ``known`` or above, now and in later batches."""
        super().check_tokens(known)
        self._vocabulary = known

    def state_dict(self, step: int) -> dict[str, Any]:
        """Where the stream is before the last ``CHECKED`` of the first ``step`` batches."""
        return self._reader.state_dict(step)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called, or read that far from the beginning."""
        self._reader.load_state_dict(saved)


class _Reader:
    """Reads batches of ``size`` prompts, without those of more than ``limit`` tokens."""

    def __init__(
        self, stream: Any, encode: Callable[..., EncodedPrompts], size: int, limit: int | None
    ) -> None:
        self._stream, self._encode, self._size, self._limit = stream, encode, size, limit
        self._name, self._lock = type(stream).__name__, Lock()
        self._names: list[str] = []  # columns of the first batch; later rows may lack some
        self._start = self._state()
        self._rewind()
        self._first = self._next()
        self._names = self._first.table.names

    def batch(self, step: int) -> _Batch:
        with self._lock:
            return self._find(step)

    def _find(self, step: int) -> _Batch:
        if step and step < self._at and step not in self._batches:
            self._rewind()
        while self._at <= step:
            self._next()
        return self._batches[step] if step else self._first

    def _rewind(self, step: int = 0, turn: int = 0, state: str | None = None) -> None:
        """Go to the beginning, or to the state before the batch of ``step``."""
        self._at, self._turn = step, turn
        self._batches: dict[int, _Batch] = {}
        self._iterator = self._open(state or self._start)

    def _open(self, state: str | None) -> Iterator[Any]:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(self._turn)
        if state is not None:
            self._stream.load_state_dict(json.loads(state))
        return iter(self._stream)

    def _state(self) -> str | None:
        try:
            state = self._stream.state_dict()
            text = json.dumps(state)
            known = hasattr(self._stream, "load_state_dict") and json.loads(text) == state
            return text if known else None  # tuples and integer keys do not survive JSON
        except Exception:  # it has none, or one that is no JSON
            return None

    def _next(self) -> _Batch:
        place, rows, dropped = (self._turn, self._state()), list[Any](), 0
        while len(rows) < self._size:
            more = [self._row() for _ in range(self._size - len(rows))]
            if self._limit is not None:
                lengths = self._encode(self._table(more), max_length=None).starts.diff()
                dropped = 0 if bool((lengths <= self._limit).any()) else dropped + len(more)
                more = [x for x, n in zip(more, lengths, strict=True) if n <= self._limit]
            if dropped > MOST_DROPPED:
                raise DataError(
                    f"{dropped} prompts in a row are longer than max_prompt_length={self._limit}"
                    " tokens; raise it, or set overlong_prompts='truncate'"
                )
            rows += more
        table = self._table(rows)
        found = self._batches[self._at] = _Batch(table, self._encode(table), *place)
        self._at += 1
        self._batches.pop(self._at - KEPT, None)
        return found

    def _table(self, rows: list[Any]) -> Table:
        empty = dict[str, Any].fromkeys(self._names)
        padded = [{**empty, **row} if isinstance(row, Mapping) else row for row in rows]
        return read_table(_Rows(getattr(self._stream, "features", None), padded))

    def _row(self) -> Any:
        for _ in range(2):
            for row in self._iterator:
                return row
            self._turn += 1
            self._iterator = self._open(self._start)
        raise DataError(
            f"train_dataset, a {self._name}, gave {self._at} batches of {self._size} prompts and"
            " then no more, also when it was read again; pass more rows, a smaller max_steps, or a"
            " datasets.IterableDataset, which can be read again"
        )

    # -- checkpoints ----------------------------------------------------------------------------

    def state_dict(self, step: int) -> dict[str, Any]:
        with self._lock:
            first = max(0, step - CHECKED)
            kept = [self._batches.get(i) for i in range(first, step)]
        found = [batch for batch in kept if batch is not None]
        if not found or len(found) < len(kept):
            return {"step": 0}
        digests = [batch.digest() for batch in found]
        return {"step": first, "turn": found[0].turn, "state": found[0].state, "digests": digests}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        with self._lock:
            if not saved.get("digests") or self._goes_on(saved):
                return
            known = saved["state"] is not None
            logger.warning(
                "train_dataset, a %s, %s: its first %d batches are read again, which is exact if"
                " it gives the same rows in the same order",
                *(self._name, "goes on elsewhere than its state was" if known else "has no state"),
                saved["step"] + len(saved["digests"]),
            )
            self._rewind()
            steps = range(saved["step"], saved["step"] + len(saved["digests"]))
            if [self._find(step).digest() for step in steps] != saved["digests"]:
                warnings.warn(
                    f"train_dataset, a {self._name}, gives other rows than before the checkpoint:"
                    " the run goes on with other prompts than without the interruption",
                    stacklevel=2,
                )

    def _goes_on(self, saved: Mapping[str, Any]) -> bool:
        if saved["state"] is None:
            return False
        try:
            self._rewind(saved["step"], saved["turn"], saved["state"])
            return [self._next().digest() for _ in saved["digests"]] == saved["digests"]
        except Exception as error:  # of the user's class
            logger.warning("the state of the stream cannot be used: %s", describe_error(error))
            return False
