"""The example of the home page and the README is one text, and it runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def example(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return str(source)


def test_the_home_page_runs(demo: Path) -> None:
    source = example("docs/index.md").replace(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "runs/demo/sft"
    )
    exec(source.replace("=160", "=32"), {})
    assert (demo / "runs" / "brief" / "model.safetensors").is_file()


def test_the_readme_shows_the_example_of_the_home_page() -> None:
    assert example("README.md") == example("docs/index.md")
