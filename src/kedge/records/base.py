"""Slicing, concatenation, replacement and moving of records of rows.

A record is a frozen dataclass of row-indexed fields.  The type of a field and the metadata set by
``rows_field`` decide how it is handled:

    Tensor [B, ...]           indexed along the first axis; other axes are padded to fit
    another record            the same, recursively
    Mapping[str, Tensor]      the same for each name; NaN where a record lacks the name
    Mapping[str, Sequence]    one value per row; None where a record lacks the name
    Mapping of metrics        metadata ``total`` joins it; it does not belong to single rows
    None                      the field is absent; metadata ``absent`` decides
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, replace
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kedge.records.errors import RolloutError

if TYPE_CHECKING:
    # Available since Python 3.11; annotations are not evaluated.
    from typing import Self  # type: ignore[attr-defined,unused-ignore]

Index = Tensor | slice


def rows_field(
    *,
    left: bool = False,
    fill: float = 0,
    absent: Literal["error", "fill", "drop"] = "error",
    wide_as: str | None = None,
    total: Callable[[Sequence[Any]], Any] | None = None,
    default: Any = MISSING,
    default_factory: Any = MISSING,
) -> Any:
    """A field of a record.

    Args:
        left: pad shorter rows on the left.
        fill: padding value.
        absent: if only some records have the field: raise an error, use ``fill`` for the rows of
            the others, or drop the field.
        wide_as: an earlier field with the same columns, as "field" or "field.of_the_record"; this
            one is padded to them, since the widest record may lack it.
        total: joins values of the field, which does not belong to single rows.
        default: as for ``dataclasses.field``.
        default_factory: as for ``dataclasses.field``.
    """
    metadata = {"left": left, "fill": fill, "absent": absent, "wide_as": wide_as, "total": total}
    return field(metadata=metadata, default=default, default_factory=default_factory)


def widen_field(f: Field[Any], x: Tensor, wide: Sequence[int]) -> Tensor:
    """Pad the axes of ``x`` after the first to the lengths ``wide``, as its field specifies."""
    padding: list[int] = []
    for have, want in reversed(list(zip(x.shape[1:], wide, strict=True))):
        padding += [want - have, 0] if f.metadata.get("left") else [0, want - have]
    return pad(x, padding, value=f.metadata.get("fill", 0)) if any(padding) else x


_fields: Callable[[Any], tuple[Field[Any], ...]] = cache(fields)  # since lookups are slower


class Record:
    """Base of the records: ``rows``, ``cat``, ``put_rows``, ``trim`` and ``to``."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(getattr(self, _fields(type(self))[0].name))

    def rows(self, index: Index) -> Self:
        """A copy of the rows ``index`` (int64 [n], in that order, or a slice)."""
        return self._mapped(lambda f, x: _take_rows(f, x, index))

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors to ``device``."""
        return self._mapped(lambda _, x: _move(x, device))

    def trim(self, size: int) -> Self:
        """A copy with the first ``size`` columns of all tensors that have columns."""

        def cut(f: Field[Any], x: Any) -> Any:
            if isinstance(x, Record) and f.metadata.get("wide_as"):
                return x.trim(size)
            return x[:, :size].clone() if isinstance(x, Tensor) and x.ndim > 1 else x

        return self._mapped(cut)

    def widen(self, size: int) -> Self:
        """A copy with ``size`` columns in all tensors that have columns, padded as in ``cat``."""
        return self._mapped(lambda f, x: _widen(f, x, size))

    @classmethod
    def cat(cls, parts: Sequence[Self], *, names: Sequence[str] = ()) -> Self:
        """Concatenate records, padded to the widest of them.

        Args:
            parts: at least one record.
            names: the origin of each record, for error messages.

        Raises:
            RolloutError: only some records have a field that has no default.
        """
        sizes = [len(part) for part in parts]
        changed: dict[str, Any] = {}
        for f in _fields(cls):
            joined = _join(f, [getattr(part, f.name) for part in parts], sizes, names)
            if like := f.metadata.get("wide_as"):
                name, *inner = like.split(".")
                joined = _widen(f, joined, reduce(getattr, inner, changed[name]).shape[1])
            changed[f.name] = joined
        return _changed(parts[0], changed)

    def put_rows(self, index: Tensor, other: Self, *, names: Sequence[str] = ()) -> Self:
        """The record with its rows ``index`` int64 [n] replaced by the n rows of ``other``.

        Totals of both are added: replaced rows have been measured as well.

        Raises:
            RolloutError: as for ``cat``.
        """
        both = type(self).cat([self, other], names=names)
        order = torch.arange(len(self))
        order[index.cpu()] = len(self) + torch.arange(len(index))
        return both.rows(order)

    def _mapped(self, change: Any) -> Self:
        fields = _fields(type(self))
        return _changed(self, {f.name: change(f, getattr(self, f.name)) for f in fields})


def _changed(record: Any, values: Mapping[str, Any]) -> Any:
    """``dataclasses.replace`` with a loose type: not all Python versions accept ``Record``."""
    return replace(record, **values)


def _widen(f: Field[Any], x: Any, columns: int) -> Any:
    if isinstance(x, Record) and f.metadata.get("wide_as"):
        return x.widen(columns)
    if isinstance(x, Tensor) and x.ndim > 1:
        return widen_field(f, x, [columns, *x.shape[2:]])
    return x


def _take_rows(f: Field[Any], x: Any, index: Index) -> Any:
    if isinstance(x, Record):
        return x.rows(index)
    if isinstance(x, Tensor):
        return x[index].clone() if isinstance(index, slice) else x[index.to(x.device)]
    if isinstance(x, Mapping) and not f.metadata.get("total"):
        return {name: _take_rows(f, values, index) for name, values in x.items()}
    if x is None or isinstance(x, Mapping):
        return x
    return x[index] if isinstance(index, slice) else [x[i] for i in index.tolist()]


def _move(x: Any, device: torch.device | str) -> Any:
    if isinstance(x, Tensor | Record):
        return x.to(device)
    if isinstance(x, Mapping):
        return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in x.items()}
    return x


def keep_field(f: Field[Any], values: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether records have the field once they are joined, by its ``values``, None where absent.

    Raises:
        RolloutError: only some records have a field that has no default.
    """
    absent = f.metadata.get("absent", "error") if any(x is None for x in values) else "fill"
    if absent == "error":
        raise _missing_field_error(f.name, values, names)
    return absent != "drop"


def _join(f: Field[Any], values: list[Any], sizes: list[int], names: Sequence[str]) -> Any:
    first = next((x for x in values if x is not None), None)
    if first is None or not keep_field(f, values, names):
        return None
    if isinstance(first, Record):
        return type(first).cat(values, names=names)
    if isinstance(first, Tensor):
        return _join_tensors(f, values, sizes, like=first)
    if total := f.metadata.get("total"):
        return total(values)
    keys = dict.fromkeys(key for x in values for key in x)
    return {key: _join_named(f, [x.get(key) for x in values], sizes) for key in keys}


def _join_tensors(
    f: Field[Any], values: Sequence[Tensor | None], sizes: list[int], like: Tensor
) -> Tensor:
    shapes = [x.shape[1:] for x in values if x is not None]
    wide = [max(lengths) for lengths in zip(*shapes, strict=True)]
    fill = f.metadata.get("fill", 0)
    return torch.cat(
        [
            like.new_full((size, *wide), fill) if x is None else widen_field(f, x, wide)
            for x, size in zip(values, sizes, strict=True)
        ]
    )


def _join_named(f: Field[Any], values: list[Any], sizes: list[int]) -> Any:
    """Concatenate one name of a mapping; missing values are NaN, or None in a list."""
    like = next(x for x in values if x is not None)
    if isinstance(like, Tensor):
        return torch.cat(
            [
                like.new_full((n,), torch.nan) if x is None else x
                for x, n in zip(values, sizes, strict=True)
            ]
        )
    columns = [[None] * n if x is None else x for x, n in zip(values, sizes, strict=True)]
    return [value for column in columns for value in column]


def add_totals(
    values: Sequence[Mapping[str, tuple[float, float]]],
) -> dict[str, tuple[float, float]]:
    """Add the (sum, count) of each name."""
    sums: dict[str, tuple[float, float]] = {}
    for totals in values:
        for name, (total, count) in totals.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
    return sums


def _missing_field_error(name: str, values: Sequence[Any], names: Sequence[str]) -> RolloutError:
    origins = names or [f"part {i} of {len(values)}" for i in range(len(values))]
    without = next(n for n, x in zip(origins, values, strict=True) if x is None)
    having = next(n for n, x in zip(origins, values, strict=True) if x is not None)
    return RolloutError(
        f"{without} returned a batch without {name}, but {having} one with it; all rollout"
        " engines and batches of a run must record it, or none of them"
    )
