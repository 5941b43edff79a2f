"""docs/reference/metrics.md is what the table of metrics says."""

from __future__ import annotations

from pathlib import Path

from docs.generate import metrics_page


def test_the_page_is_current() -> None:
    file = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    assert file.read_text() == metrics_page(), "python docs/generate.py"
