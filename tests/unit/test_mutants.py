"""The seeded bugs still fit the source, and a few of them are caught."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, survives


def test_every_bug_still_has_its_place() -> None:
    files = {m.file: ROOT / "src/kedge" / m.file for m in MUTANTS}
    there = {x for x, path in files.items() if path.exists() or not x.startswith("ext/")}
    gone = [m.name for m in MUTANTS if m.file in there and m.old not in files[m.file].read_text()]
    assert gone == []
    assert len(MUTANTS) >= 75  # a group that stands twice loses one


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS[:3], ids=lambda m: m.name)
def test_a_few_are_caught(mutant: object) -> None:
    assert not survives(mutant)  # type: ignore[arg-type]
