"""The pages on algorithms: tables as the code has them, examples that run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kedge.algorithms import BUILTIN
from kedge.algorithms.reference import described, renewed
from kedge.testing import tiny_policy
from tests.unit.text_toys import word_tokenizer

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"


@pytest.mark.parametrize("name", BUILTIN)
def test_the_options_are_those_of_the_code(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert (
        renewed(page, BUILTIN[name]) == page
    )  # python -m kedge.algorithms.reference docs/algorithms
    assert all(described(BUILTIN[name]).values())


@pytest.mark.parametrize("name", BUILTIN)
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {
        "folder": str(tmp_path),
        "tokenizer": word_tokenizer(),
        "model": tiny_policy(vocab_size=32),
        "prompts": [{"prompt": f"w{i} w{i + 1}"} for i in range(3, 12)],
    }
    exec(example, names)
    assert names["trainer"].state.global_step == 1


def test_the_overview_names_every_page() -> None:
    overview = (PAGES / "index.md").read_text(encoding="utf-8")
    assert all(f"({name}.md)" in overview for name in BUILTIN)
