"""Totals in lines: what is added beyond them is paid for by deleting."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Raw lines, docstrings included: the core, what attaches to it, tests, benchmarks.
TOTALS = {"core": 33_300, "ext": 17_000, "tests": 44_700, "benchmarks": 5_050}


@pytest.mark.parametrize("name", TOTALS)
def test_total(name: str) -> None:
    ext = ROOT / "src/kedge/ext"
    folder = {"core": ROOT / "src", "ext": ext}.get(name, ROOT / name)
    files = (x for x in folder.rglob("*.py") if name != "core" or not x.is_relative_to(ext))
    files = (x for x in files if "/." not in str(x.relative_to(ROOT)))  # environments of benchmarks
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert lines <= TOTALS[name], f"{name}: {lines} lines, the limit is {TOTALS[name]}"
