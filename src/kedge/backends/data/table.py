"""A common interface for all supported kinds of datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from kedge.errors import DataError


class Table(Protocol):
    """Named columns of equal length, read by row index."""

    @property
    def names(self) -> list[str]:
        """Column names."""
        ...

    def __len__(self) -> int: ...

    def take(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Any]]:
        """The given columns of the given rows, as plain Python values."""
        ...


class ColumnTable:
    """Columns in memory."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the dataset's columns must have the same length, got {lengths}")
        self._columns = columns
        self._length = next(iter(lengths.values()), 0)

    @property
    def names(self) -> list[str]:
        """Column names."""
        return list(self._columns)

    def __len__(self) -> int:
        return self._length

    def take(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Any]]:
        """The given columns of the given rows."""
        return {name: [self._columns[name][row] for row in rows] for name in names}


class ArrowTable:
    """A ``datasets.Dataset``, left on disk and read in slices."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset.with_format(None)

    @property
    def names(self) -> list[str]:
        """Column names."""
        return list(self.dataset.column_names)

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Any]]:
        """The given columns of the given rows."""
        if not names:
            return {}
        try:
            index = rows if isinstance(rows, range) else list(rows)  # a range is read as a slice
            return dict(self.dataset.select_columns(list(names))[index])
        except Exception as error:  # a damaged file, a lost disk
            raise DataError(
                f"rows of the dataset cannot be read: {type(error).__name__}: {error}"
            ) from error


def read_table(dataset: Any) -> Table:
    """A table over a ``datasets.Dataset``, a list of dicts, a dict of columns or a torch dataset.

    Raises:
        DataError: no dataset, a stream (a resumed run must be able to read the same rows again), or
            an unsupported type.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, (str, type(None))):
        raise DataError(
            f"the dataset is {dataset!r}; load it first, for example"
            " datasets.load_dataset('json', data_files='prompts.jsonl', split='train')"
        )
    if isinstance(dataset, Mapping):
        if any(hasattr(split, "column_names") for split in dataset.values()):
            splits = ", ".join(map(str, dataset))
            raise DataError(f"the dataset is a {kind} with the splits {splits}; pass one of them")
        return ColumnTable(_check_columns(dataset))
    if hasattr(dataset, "column_names") and hasattr(dataset, "with_format"):
        if not hasattr(dataset, "__len__"):
            raise DataError(_stream_error(kind))
        if dataset.format["type"] != "custom":
            return ArrowTable(dataset)
    if isinstance(dataset, Iterator) or not hasattr(dataset, "__getitem__"):
        if hasattr(dataset, "__iter__"):
            raise DataError(_stream_error(kind))
        raise DataError(f"a dataset must be a datasets.Dataset or a list of dicts, got {kind}")
    if not hasattr(dataset, "__len__"):
        raise DataError(_stream_error(kind))
    return ColumnTable(_columns([_row(dataset, row) for row in range(len(dataset))], kind))


def _row(dataset: Any, row: int) -> Any:
    try:
        return dataset[row]
    except Exception as error:  # whatever the user's class raises
        raise DataError(
            f"row {row} of the dataset, a {type(dataset).__name__}, cannot be read:"
            f" {type(error).__name__}: {error}; pass a datasets.Dataset (for a pandas frame:"
            " datasets.Dataset.from_pandas(frame)) or a list of dicts"
        ) from error


def _stream_error(kind: str) -> str:
    return (
        f"the dataset is a {kind}, a stream without row indices, so a resumed run could not read"
        " the same prompts again; load the rows you need into memory first, for example"
        " datasets.Dataset.from_list(list(stream.take(100_000)))"
    )


def _check_columns(columns: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    for name, values in columns.items():
        if isinstance(values, str) or not hasattr(values, "__getitem__"):
            raise DataError(
                f"column {name!r} must be a list, got {type(values).__name__}; a dict maps"
                " column names to lists (pass a single row as [row])"
            )
    return {
        name: values.tolist() if hasattr(values, "tolist") else values
        for name, values in columns.items()
    }


def _columns(rows: list[Any], kind: str) -> dict[str, list[Any]]:
    names: dict[str, None] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} of the dataset ({kind}) must be a dict such as {{'prompt': text}},"
                f" got {type(row).__name__}"
            )
        names.update(dict.fromkeys(row))
    return {name: [row.get(name) for row in rows] for name in names}
