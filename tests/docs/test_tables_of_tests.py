"""The tables in docs/trust name tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "trust").glob("*.md"))


def functions_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_named_test_exists(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
    assert len(named) > 20
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert not test or test in functions_in(ROOT / file), f"{file}::{test}"
