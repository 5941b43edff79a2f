"""The page of metrics, made from their table.

python -m kedge.engine.metrics_page > docs/reference/metrics.md
"""

from __future__ import annotations

import sys

from kedge.engine.metrics import NAMES, PREFIXES, SEED_NAMES, SEED_PREFIXES, TRL_NAMES, TRL_NOTES

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


TRL_HEAD = """
## Under TRL's names

`GRPOTrainer` and `RLOOTrainer` log these, too, in training and with `eval_` in evaluations. Not
logged: `clip_ratio/low_min` and `clip_ratio/high_max`, extremes over micro-batches, which are cut
to fit memory here; and `total_flos`, since the operations of sampling and scoring are not counted.

| TRL | here |
|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    parts = [NAMES | {f"{prefix}...": text for prefix, text in PREFIXES.items()}]
    parts += [SEED_NAMES | SEED_PREFIXES, TRL_NAMES | TRL_NOTES]
    tables = ["".join(f"| `{n}` | {_cell(x)} |\n" for n, x in part.items()) for part in parts]
    return "".join(h + t for h, t in zip((HEAD, SEED_HEAD, TRL_HEAD), tables, strict=True))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
