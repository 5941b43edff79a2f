"""A common interface for all supported kinds of datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kedge.errors import DataError


class ColumnTable:
    """Named columns of equal length in memory."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        for name in columns:
            if not isinstance(name, str):
                raise DataError(f"the dataset's column names must be text, got {name!r}")
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the dataset's columns must have the same length, got {lengths}")
        self._columns, self.names = columns, list(columns)
        self._length = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._length

    def take(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Any]]:
        """The given columns of the given rows, as plain Python values."""
        return {name: [self._columns[name][row] for row in rows] for name in names}


class ArrowTable:
    """A ``datasets.Dataset``, left on disk and read in slices."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset.with_format(None)
        self.names: list[str] = list(dataset.column_names)

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Any]]:
        """The given columns of the given rows, as plain Python values."""
        if not names:
            return {}
        try:
            index = rows if isinstance(rows, range) else list(rows)  # a range is read as a slice
            return dict(self.dataset.select_columns(list(names))[index])
        except Exception as error:  # for example a damaged file or a lost disk
            raise DataError(
                f"rows of the dataset cannot be read: {type(error).__name__}: {error}"
            ) from error


Table = ColumnTable | ArrowTable


def read_table(dataset: Any) -> Table:
    """A table over a ``datasets.Dataset``, a list of dicts, a dict of columns or a torch dataset.

    Raises:
        DataError: no dataset, a stream (a resumed run must read the same rows again), or
            an unsupported type.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, (str, type(None))):
        raise DataError(
            f"the dataset is {dataset!r}; load it first, for example"
            " datasets.load_dataset('json', data_files='prompts.jsonl', split='train')"
        )
    if isinstance(dataset, Mapping):
        return _read_columns(dataset)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
            raise DataError(f"a dataset must be a datasets.Dataset or a list of dicts, got {kind}")
        raise DataError(
            f"the dataset is a {kind}, a stream without row indices, so a resumed run could not"
            " read the same prompts again; load the rows you need into memory first, for example"
            " datasets.Dataset.from_list(list(stream.take(100_000)))"
        )
    if hasattr(dataset, "with_format") and dataset.format["type"] != "custom":
        return ArrowTable(dataset)
    return _read_rows(dataset)


def _read_rows(dataset: Any) -> ColumnTable:
    rows, kind = list[Mapping[str, Any]](), type(dataset).__name__
    for number in range(len(dataset)):
        try:
            row = dataset[number]
        except Exception as error:  # the user's class may raise anything
            raise DataError(
                f"row {number} of the dataset, a {kind}, cannot be read:"
                f" {type(error).__name__}: {error}; pass a datasets.Dataset (for a pandas frame:"
                " datasets.Dataset.from_pandas(frame)) or a list of dicts"
            ) from error
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} of the dataset ({kind}) must be a dict such as {{'prompt': text}},"
                f" got {type(row).__name__}"
            )
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return ColumnTable({name: [row.get(name) for row in rows] for name in names})


def _read_columns(columns: Mapping[str, Any]) -> ColumnTable:
    if any(hasattr(split, "column_names") for split in columns.values()):
        raise DataError(
            f"the dataset is a {type(columns).__name__} with the splits"
            f" {', '.join(map(str, columns))}; pass one of them"
        )
    lists = {n: x.tolist() if hasattr(x, "tolist") else x for n, x in columns.items()}
    for name, values in lists.items():
        if isinstance(values, str) or not hasattr(values, "__getitem__"):
            raise DataError(
                f"column {name!r} must be a list, got {type(values).__name__}; a dict maps"
                " column names to lists (pass a single row as [row])"
            )
    return ColumnTable(lists)
