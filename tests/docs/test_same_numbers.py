"""A figure that stands on several pages is the same on all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RATE = r"([\d.]+)%"

# Where each figure stands: the page, and an expression whose groups are the figure.
FIGURES = {
    "chat model, right and as asked": {
        "docs/results.md": rf"right and as asked {RATE} to {RATE}",
        "docs/chat_model.md": rf"went from {RATE} to {RATE}",
    },
    "chat model, minutes": {
        "docs/results.md": r"GRPO, ([\d.]+) minutes on two CPU cores",
        "docs/chat_model.md": r"([\d.]+) minutes on two CPU cores",
    },
    "PPO against TRL on a GPU, time and memory": {
        "README.md": r"([\d.]+) times as fast as TRL 1.12's, with ([\d.]+) of the memory",
        "docs/performance.md": r"([\d.]+) times as fast as TRL's, with ([\d.]+) of its memory",
    },
    "demo, mean and worst seed": {
        "README.md": rf"to {RATE}, worst seed {RATE}",
        "docs/results.md": rf"PPO {RATE}, worst seed {RATE}",
        "docs/demo.md": rf"\| PPO \|.*\| {RATE} \| {RATE} \|",
    },
    "demo, perfect summaries": {
        "README.md": rf"perfect summaries: {RATE}",
        "docs/results.md": rf"perfect summaries {RATE}",
        "docs/demo.md": rf"Perfect summaries would win {RATE}",
    },
    "demo, minutes": {
        "README.md": r"make demo +# about (\w+) minutes",
        "docs/demo.md": r"takes about (\w+) minutes",
        "src/kedge/demo/demo.py": r"in about (\w+) minutes on one CPU core",
        "src/kedge/cli/main.py": r"in about (\w+) minutes on a CPU",
    },
    "schedules in order": {
        "docs/async.md": r"In ([\d,]+) random schedules",
        "tests/property/test_staleness.py": r"SCHEDULES = ([\d_]+)",
    },
    "schedules as completed": {
        "docs/async.md": r"In ([\d,]+) simulated schedules",
        "tests/property/test_as_completed.py": r"SCHEDULES = ([\d_]+)",
    },
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_is_the_same_on_every_page(name: str) -> None:
    found = {}
    for page, expression in FIGURES[name].items():
        match = re.search(expression, (ROOT / page).read_text(encoding="utf-8"))
        assert match, f"{page} does not state: {name}"
        found[page] = [figure.replace("_", ",") for figure in match.groups()]
    assert len(set(map(tuple, found.values()))) == 1, found
