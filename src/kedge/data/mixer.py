"""Mixes several datasets into one: ``name 0.5 other 400``."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from kedge.records.errors import DataError

EXAMPLE = "'name 0.5 other 400' takes half of one dataset and 400 rows of another"


def parse_mixer(mixer: str | Sequence[str]) -> list[tuple[str, float]]:
    """Names and amounts of a mixture, which alternate in it.

    A number with a decimal point is a fraction of the dataset (1.0: all of it), returned as a
    float; one without is a number of rows, returned as an int.  Amounts larger than the dataset
    repeat its rows.
    """
    words = mixer.split() if isinstance(mixer, str) else [str(word) for word in mixer]
    if not words or len(words) % 2:
        raise DataError(
            f"dataset mixer {' '.join(words)!r} must alternate names and amounts: {EXAMPLE}"
        )
    parts = []
    for name, text in zip(words[::2], words[1::2], strict=True):
        number = re.fullmatch(r"[0-9]*\.[0-9]+|[0-9]+\.?", text)
        amount = 0.0 if number is None else float(text) if "." in text else int(text)
        if not amount:
            raise DataError(
                f"dataset mixer: the amount {text!r} of {name!r} must be a positive fraction such"
                f" as 0.5 or a number of rows such as 400: {EXAMPLE}"
            )
        parts.append((name, amount))
    return parts


def choose_rows(name: str, amount: float, available: int, *, seed: int, position: int) -> list[int]:
    """Rows to take from the dataset at ``position`` in a mixture, which has ``available`` rows."""
    wanted = round(amount * available) if isinstance(amount, float) else amount
    if not wanted or not available:
        raise DataError(
            f"the dataset mixer takes no row of {name!r}, which has {available}; remove it from the"
            " mixer, or take more"
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
    """Mix datasets into one ``datasets.Dataset``; columns that a dataset lacks are None.

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
    for position, (name, amount) in enumerate(parse_mixer(mixer)):
        rows = load(name)
        chosen = rows.select(choose_rows(name, amount, len(rows), seed=seed, position=position))
        if name_column is not None:
            if name_column in chosen.column_names:
                raise DataError(
                    f"dataset mixer: {name!r} already has a column {name_column!r}; choose"
                    " another name_column"
                )
            chosen = chosen.add_column(name_column, [name] * len(chosen))
        parts.append(chosen)
    try:
        return datasets.concatenate_datasets(parts)
    except (ValueError, TypeError) as error:  # pyarrow's errors are ValueErrors and TypeErrors
        raise DataError(f"the datasets of the mixer cannot be concatenated: {error}") from error
