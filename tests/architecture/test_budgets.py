"""Two totals in lines: what is added beyond them is paid for by deleting."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Raw lines, docstrings included.
TOTALS = {"src": 49_600, "tests": 44_000}


@pytest.mark.parametrize("folder", TOTALS)
def test_total(folder: str) -> None:
    lines = sum(
        len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")
    )
    assert lines <= TOTALS[folder], f"{folder}: {lines} lines, the limit is {TOTALS[folder]}"
