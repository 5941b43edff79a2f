"""The home page's example runs, and the first run is the README's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def example(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return str(found)


@pytest.mark.slow
def test_the_home_page_runs(demo: Path) -> None:
    exec(example("docs/index.md").replace("640", "8").replace("=64", "=4"), {})
    assert (demo / "runs" / "brief" / "model.safetensors").is_file()


def test_getting_started_shows_the_readmes_first_run() -> None:
    assert example("docs/getting-started.md") == example("README.md")
