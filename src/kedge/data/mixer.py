"""Mixes several datasets into one: ``name 0.5 other 400``."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.errors import DataError

EXAMPLE = "'name 0.5 other 400' takes half of one dataset and 400 rows of another"


@dataclass(frozen=True, slots=True)
class Part:
    """One dataset of a mixture.

    Attributes:
        name: passed to the loader.
        fraction: fraction of its rows, or None.
        rows: number of rows, or None.
    """

    name: str
    fraction: float | None = None
    rows: int | None = None


def parse_mixer(mixer: str | Sequence[str]) -> list[Part]:
    """Parse a mixture written as alternating names and amounts.

    A number with a decimal point is a fraction of the dataset (1.0: all of it); one without is a
    number of rows.  Amounts larger than the dataset repeat its rows.

    Args:
        mixer: ``"name 0.5 other 400"``, or the same words in a list.

    Raises:
        DataError: the mixture cannot be parsed.
    """
    words = mixer.split() if isinstance(mixer, str) else [str(word) for word in mixer]
    if not words or len(words) % 2:
        raise DataError(
            f"dataset mixer {' '.join(words)!r} must alternate names and amounts: {EXAMPLE}"
        )
    parts = []
    for name, amount in zip(words[::2], words[1::2], strict=True):
        part = Part(name)
        if re.fullmatch(r"[0-9]+", amount):
            part = Part(name, rows=int(amount))
        elif re.fullmatch(r"[0-9]*\.[0-9]+|[0-9]+\.", amount):
            part = Part(name, fraction=float(amount))
        if not (part.rows or part.fraction):
            raise DataError(
                f"dataset mixer: the amount {amount!r} of {name!r} must be a positive fraction"
                f" such as 0.5 or a number of rows such as 400: {EXAMPLE}"
            )
        parts.append(part)
    return parts


def choose_rows(part: Part, available: int, *, seed: int, position: int) -> list[int]:
    """Rows to take from a dataset, chosen at random; deterministic in seed and position.

    Args:
        part: fraction or number of rows.
        available: rows of the dataset.
        seed: seed of the choice.
        position: position of the dataset in the mixture.

    Raises:
        DataError: no row would be taken.
    """
    wanted = part.rows if part.fraction is None else round(part.fraction * available)
    if not wanted or not available:
        raise DataError(
            f"the dataset mixer takes no row of {part.name!r}, which has {available}; remove"
            " it from the mixer, or take more"
        )
    whole, rest = divmod(wanted, available)
    generator = random.Random(f"mixer/{seed}/{position}")
    return sorted([*list(range(available)) * whole, *generator.sample(range(available), rest)])


def mix(
    mixer: str | Sequence[str],
    load: Callable[[str], Any],
    *,
    seed: int = 0,
    name_column: str | None = None,
) -> Any:
    """One ``datasets.Dataset`` from several; columns that a dataset lacks are None in its rows.

    Args:
        mixer: see ``parse_mixer``.
        load: returns the ``datasets.Dataset`` for a name.
        seed: seed of the choice of rows.
        name_column: column to add with the name of the dataset that each row came from.

    Raises:
        DataError: the mixer cannot be parsed, ``name_column`` already exists, or two datasets have
            different types in one column.
    """
    import datasets

    parts = []
    for position, part in enumerate(parse_mixer(mixer)):
        rows = load(part.name)
        chosen = rows.select(choose_rows(part, len(rows), seed=seed, position=position))
        if name_column is not None:
            if name_column in chosen.column_names:
                raise DataError(
                    f"dataset mixer: {part.name!r} already has a column {name_column!r}; choose"
                    " another name_column"
                )
            chosen = chosen.add_column(name_column, [part.name] * len(chosen))
        parts.append(chosen)
    try:
        return datasets.concatenate_datasets(parts)
    except (ValueError, TypeError) as error:  # pyarrow's errors are ValueErrors and TypeErrors
        raise DataError(f"the datasets of the mixer cannot be concatenated: {error}") from error
