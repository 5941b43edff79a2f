"""The page of metrics, made from their table.

python -m kedge.engine.metrics_page > docs/reference/metrics.md
"""

from __future__ import annotations

import sys

from kedge.engine.metrics import NAMES, PREFIXES, SEED_NAMES, SEED_PREFIXES

HEAD = """# Metrics

One row is logged every `logging_steps` updates: the mean over the updates since the last row, of
values that are already means over the whole batch of all processes, real tokens only. Rows are in
`trainer.state.log_history`, in `metrics.jsonl`, on screen and wherever `report_to` says.

| metric | meaning |
|---|---|
"""

SEED_HEAD = """
## Of asynchronous PPO

`kedge async-ppo` logs these besides, under open-instruct's names.

| metric | meaning |
|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in NAMES.items()]
    rows += [f"| `{prefix}...` | {_cell(text)} |" for prefix, text in PREFIXES.items()]
    seed = [f"| `{name}` | {_cell(text)} |" for name, text in (SEED_NAMES | SEED_PREFIXES).items()]
    return HEAD + "\n".join(rows) + "\n" + SEED_HEAD + "\n".join(seed) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
