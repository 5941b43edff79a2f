"""Every example of the page on rewards runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kedge import verifiers
from tests.unit import sandbox_attacks as attacks

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 7


@pytest.mark.parametrize("number", range(7))
def test_example(number: int) -> None:
    if "Sandbox" in EXAMPLES[number] and attacks.WHY_NOT:
        pytest.skip(attacks.WHY_NOT)
    exec(EXAMPLES[number], {})


def test_every_public_name_is_on_the_page() -> None:
    helpers = {"Outcome", "VERIFIERS", "Verifier", "ByColumn", "text_of"}
    missing = [name for name in verifiers.__all__ if name not in PAGE and name not in helpers]
    assert missing == []


def test_the_table_counts_the_attacks() -> None:
    counts = re.findall(r"^\| ([\w ]+):.*?\| (\d+) \|", PAGE, flags=re.MULTILINE)
    assert dict(counts) == {
        "files": str(len(attacks.FILES)),
        "processes": str(len(attacks.PROCESSES)),
        "network": str(len(attacks.NETWORK)),
        "the system": str(len(attacks.PRIVILEGED)),
        "verdicts": str(len(attacks.SCORES)),
        "staying": str(len(attacks.STAYING)),
        "bombs": str(len(attacks.BOMBS)),
    }
