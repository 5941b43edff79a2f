"""How a record of rows is cut, joined, patched and moved: written once, for all records.

A record is a frozen dataclass whose fields are row-indexed.  What a field holds decides what
happens to it, and the metadata that ``rows_field`` sets decides the rest:

    Tensor [B, ...]           rows are taken along the first axis; the others are padded to fit
    another record            the same, within it
    Mapping[str, Tensor]      the same for each name; NaN where a part lacks the name
    Mapping[str, Sequence]    one value per row; None where a part lacks the name
    Mapping of (sum, count)   metadata ``totals``: sums and counts add
    None                      the part lacks the field; metadata ``absent`` says what follows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kedge.errors import RolloutError

Index = Tensor | slice


def rows_field(
    *,
    left: bool = False,
    fill: float = 0,
    absent: Literal["error", "fill", "drop"] = "error",
    totals: bool = False,
    default: Any = MISSING,
    default_factory: Any = MISSING,
) -> Any:
    """A field of a record.

    Args:
        left: shorter rows are padded on the left.
        fill: what stands in padding.
        absent: what becomes of the field where some parts lack it: an error, ``fill`` in the rows
            of those parts, or no part keeps it.
        totals: it maps names to (sum, count).
        default: as for ``dataclasses.field``.
        default_factory: as for ``dataclasses.field``.
    """
    about = {"left": left, "fill": fill, "absent": absent, "totals": totals}
    return field(metadata=about, default=default, default_factory=default_factory)


def widened(x: Tensor, wide: Sequence[int], *, left: bool = False, fill: float = 0) -> Tensor:
    """``x`` with its axes after the first as long as ``wide`` says, padded on one side."""
    room: list[int] = []
    for have, want in reversed(list(zip(x.shape[1:], wide, strict=True))):
        room += [want - have, 0] if left else [0, want - have]
    return pad(x, room, value=fill) if any(room) else x


def widen_field(f: Field[Any], x: Tensor, wide: Sequence[int]) -> Tensor:
    """``x`` padded to ``wide`` on the side and with the value of the field that holds it."""
    return widened(x, wide, left=f.metadata.get("left", False), fill=f.metadata.get("fill", 0))


class Record:
    """Base of the records: ``rows``, ``cat``, ``put_rows``, ``trim`` and ``to``."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    def rows(self, index: Index) -> Self:
        """A copy of the rows ``index`` (int64 [n], in that order, or a slice)."""
        return self._mapped(lambda f, x: _cut(f, x, index))

    def to(self, device: torch.device | str) -> Self:
        """The record with its tensors on ``device``."""
        return self._mapped(lambda _, x: _moved(x, device))

    def trim(self, size: int) -> Self:
        """A copy with the first ``size`` columns of every tensor that has columns."""

        def cut(_: Field[Any], x: Any) -> Any:
            return x[:, :size].clone() if isinstance(x, Tensor) and x.ndim > 1 else x

        return self._mapped(cut)

    @classmethod
    def cat(cls, parts: Sequence[Self], *, names: Sequence[str] = ()) -> Self:
        """The rows of all parts in order, padded to the widest of them.

        Args:
            parts: at least one.
            names: what each part came from, for messages.

        Raises:
            RolloutError: some parts lack a field that no value can stand in for.
        """
        sizes = [len(part) for part in parts]
        changed = {
            f.name: _joined(f, [getattr(part, f.name) for part in parts], sizes, names)
            for f in fields(cls)  # type: ignore[arg-type]
        }
        return replace(parts[0], **changed)  # type: ignore[type-var]

    def put_rows(self, index: Tensor, other: Self, *, names: Sequence[str] = ()) -> Self:
        """The record with the rows ``index`` int64 [n] taken from the n rows of ``other``.

        Totals are those of both: rows that were replaced have been measured, too.

        Raises:
            RolloutError: as for ``cat``.
        """
        both = type(self).cat([self, other], names=names)
        place = torch.arange(len(self))
        place[index.cpu()] = len(self) + torch.arange(len(index))
        return both.rows(place)

    def _mapped(self, change: Any) -> Self:
        return replace(self, **{f.name: change(f, getattr(self, f.name)) for f in fields(self)})  # type: ignore[type-var, arg-type]


def _cut(f: Field[Any], x: Any, index: Index) -> Any:
    if isinstance(x, Record):
        return x.rows(index)
    if isinstance(x, Tensor):
        return x[index].clone() if isinstance(index, slice) else x[index.to(x.device)]
    if isinstance(x, Mapping) and not f.metadata.get("totals"):
        return {name: _cut(f, values, index) for name, values in x.items()}
    if x is None or isinstance(x, Mapping):
        return x
    return x[index] if isinstance(index, slice) else [x[i] for i in index.tolist()]


def _moved(x: Any, device: torch.device | str) -> Any:
    if isinstance(x, Tensor | Record):
        return x.to(device)
    if isinstance(x, Mapping):
        return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in x.items()}
    return x


def _joined(f: Field[Any], held: list[Any], sizes: list[int], names: Sequence[str]) -> Any:
    first = next((x for x in held if x is not None), None)
    if first is None:
        return None
    if any(x is None for x in held):
        absent = f.metadata.get("absent", "error")
        if absent == "drop":
            return None
        if absent == "error":
            raise _missing(f.name, held, names)
    if isinstance(first, Record):
        return type(first).cat(held, names=names)
    if isinstance(first, Tensor):
        return _stacked(f, held, sizes, like=first)
    if f.metadata.get("totals"):
        return _added(held)
    keys = dict.fromkeys(key for x in held for key in x)
    return {key: _column(f, [x.get(key) for x in held], sizes) for key in keys}


def _stacked(
    f: Field[Any], held: Sequence[Tensor | None], sizes: list[int], like: Tensor
) -> Tensor:
    shapes = [x.shape[1:] for x in held if x is not None]
    wide = [max(lengths) for lengths in zip(*shapes, strict=True)]
    fill = f.metadata.get("fill", 0)
    return torch.cat(
        [
            like.new_full((size, *wide), fill) if x is None else widen_field(f, x, wide)
            for x, size in zip(held, sizes, strict=True)
        ]
    )


def _column(f: Field[Any], held: list[Any], sizes: list[int]) -> Any:
    """One name of a mapping; the value of rows whose part lacks it is NaN, or None in a list."""
    like = next(x for x in held if x is not None)
    if isinstance(like, Tensor):
        return torch.cat(
            [
                like.new_full((n,), torch.nan) if x is None else x
                for x, n in zip(held, sizes, strict=True)
            ]
        )
    columns = [[None] * n if x is None else x for x, n in zip(held, sizes, strict=True)]
    return [value for column in columns for value in column]


def _added(held: list[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    sums: dict[str, tuple[float, float]] = {}
    for each in held:
        for name, (total, count) in each.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
    return sums


def _missing(name: str, held: list[Any], names: Sequence[str]) -> RolloutError:
    called = names or [f"part {i} of {len(held)}" for i in range(len(held))]
    without = next(n for n, x in zip(called, held, strict=True) if x is None)
    having = next(n for n, x in zip(called, held, strict=True) if x is not None)
    return RolloutError(
        f"{without} returned a batch without {name}, and {having} one with it; every rollout engine"
        " and every batch of a run must record it, or none"
    )
