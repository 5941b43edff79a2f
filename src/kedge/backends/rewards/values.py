"""Parses the return value of a reward function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from kedge.errors import RewardError

LARGEST = 3.4e38  # scores are float32; a larger number would become infinite


@dataclass(slots=True)
class Values:
    """One entry per row; each row is in exactly one of four fields."""

    scores: dict[int, float] = field(default_factory=dict)
    dense: dict[int, list[float]] = field(default_factory=dict)  # one number per response token
    absent: set[int] = field(default_factory=set)  # None: does not apply
    errors: dict[int, str] = field(default_factory=dict)  # what is wrong with the value


def read_values(
    returned: Any,
    lengths: Sequence[int],
    width: int,
    name: str,
    *,
    values: Values | None = None,
    first: int = 0,
) -> Values:
    """Parse a function's return value into rows.

    Args:
        returned: list, tuple, array or tensor: per row a number, None, or a number per token.
        lengths: response tokens of each row.
        width: columns of the padded response tensor; rows of a 2-D tensor may be that long.
        name: of the function, for messages.
        values: rows are added to these.
        first: number of the first row.

    Raises:
        RewardError: ``returned`` does not have one entry per row.
    """
    padded = getattr(returned, "ndim", 1) == 2
    rows = _plain(returned, name)
    if not isinstance(rows, (list, tuple)):
        raise RewardError(
            f"reward function {name} must return a list with one number (or None) for each of the"
            f" {len(lengths)} completions, got {type(returned).__name__}"
        )
    if len(rows) != len(lengths):
        raise RewardError(
            f"reward function {name} must return one number (or None) per completion: got"
            f" {len(rows)} for {len(lengths)} completions"
        )
    values = values or Values()
    for row, (entry, length) in enumerate(zip(rows, lengths, strict=True), first):
        plain = _plain(entry, name)
        if plain is None:
            values.absent.add(row)
        elif isinstance(plain, Real):
            _add_number(values, row, plain)
        elif isinstance(plain, (list, tuple)):
            cut = plain[:length] if padded and len(plain) == width else plain
            _add_per_token(values, row, cut, length)
        else:
            values.errors[row] = (
                f"returned {type(plain).__name__} {str(plain)[:80]!r}, not a number"
            )
    return values


def _plain(returned: Any, name: str) -> Any:
    """Convert arrays and tensors to lists and numbers; return anything else unchanged."""
    if not hasattr(returned, "tolist"):
        return returned
    try:
        return returned.tolist()
    except Exception as error:  # a meta or sparse tensor, or a custom array type
        kind = getattr(returned, "layout", None) or type(returned).__name__
        where = f" on {returned.device}" if hasattr(returned, "device") else ""
        raise RewardError(
            f"reward function {name} returned a {type(returned).__name__} ({kind}{where}) whose"
            f" numbers cannot be read ({type(error).__name__}: {error}); return a list of numbers"
            " or a dense tensor"
        ) from error


def _add_number(values: Values, row: int, number: Real) -> None:
    if _is_finite(number):
        values.scores[row] = float(number)
    else:
        values.errors[row] = (
            f"returned {_format(number)}, which is not a finite float32; return None where the"
            " reward does not apply"
        )


def _format(number: Any) -> str:
    try:
        return str(number)[:80]
    except ValueError:  # Python does not print more than 4,300 digits
        return "a number of more than 4,300 digits"


def _is_finite(number: Any) -> bool:
    return isinstance(number, Real) and bool(-LARGEST <= number <= LARGEST)  # type: ignore[operator]


def _add_per_token(values: Values, row: int, numbers: Sequence[Any], length: int) -> None:
    if len(numbers) != length:
        values.errors[row] = (
            f"returned {len(numbers)} per-token rewards for a response of {length} tokens"
        )
    elif not all(map(_is_finite, numbers)):
        bad = next(n for n in numbers if not _is_finite(n))
        values.errors[row] = f"returned the per-token reward {_format(bad)}, not a finite number"
    else:
        values.dense[row] = [float(n) for n in numbers]
