"""The page of options, made from the fields and from where each acts."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

import transformers
from transformers import TrainingArguments

from kedge.config.field_support import FIELD_SUPPORT
from kedge.config.ppo import PPOConfig
from kedge.config.removed import REMOVED
from kedge.config.support import UNKNOWN, Honoured, Moved, Refused, default_of

HEAD = """\
# Options of PPOTrainer

Every field of `kedge.PPOConfig`, which is `transformers.TrainingArguments` with the fields of PPO.
Each one acts, hands its value to a newer name, or is refused when it is set away from its default;
none is read and forgotten.  On the command line a field `name` is `--name VALUE`; a yes-or-no field
is `--name` and `--no_name`.  `max_steps`, `logging_steps`, `save_steps`, `eval_steps` and
`warmup_steps` count updates: one batch of responses each.

This page is made by `python -m kedge.config.reference`, here with transformers {version}.
"""


def options_page() -> str:
    """The whole page, in Markdown."""
    inherited = {f.name for f in fields(TrainingArguments)}
    mine: list[str] = []
    taken: list[str] = []
    refused: list[str] = []
    older: list[str] = []
    for field in fields(PPOConfig):
        support = FIELD_SUPPORT.get(field.name, UNKNOWN)
        if isinstance(support, Honoured):
            (taken if field.name in inherited else mine).append(_honoured(field, support))
        elif isinstance(support, Moved):
            older.append(f"| `{field.name}` | `{support.to}` |")
        elif field.name not in REMOVED:
            refused.append(f"| `{field.name}` | {support.reason} | {support.way_out} |")
    gone = [_gone(name, each) for name, each in REMOVED.items() if isinstance(each, Refused)]
    return "\n".join(
        [
            HEAD.format(version=transformers.__version__),
            *_table("Fields of Kedge", "| field | default | meaning | acts in |", mine),
            *_table("Inherited fields that act", "| field | default | meaning | acts in |", taken),
            *_table("Inherited fields that are refused", "| field | why | instead |", refused),
            *_table("Older names", "| field | now |", older),
            *_table("Older fields that are refused", "| field | why | instead |", gone),
        ]
    )


def _honoured(field: Field[Any], support: Honoured) -> str:
    text = " ".join(str(field.metadata.get("help", "")).split()).replace("|", "\\|")
    shown = default_of(field)
    return f"| `{field.name}` | `{getattr(shown, 'value', shown)!r}` | {text} | {support.where} |"


def _gone(name: str, support: Refused) -> str:
    return f"| `{name}` | {support.reason} | {support.way_out} |"


def _table(title: str, head: str, rows: list[str]) -> list[str]:
    return [f"## {title}", "", head, "|---" * (head.count("|") - 1) + "|", *rows, ""]


if __name__ == "__main__":
    import sys

    sys.stdout.write(options_page())
