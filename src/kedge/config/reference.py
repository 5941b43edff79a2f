"""The pages of options, made from the fields and from where each acts.

python -m kedge.config.reference docs/reference
"""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

import transformers
from transformers import TrainingArguments

from kedge.config.async_ppo import AsyncPPOConfig
from kedge.config.declare import default_of
from kedge.config.grpo import GRPOConfig
from kedge.config.on_policy import OnPolicyConfig
from kedge.config.ppo import PPOConfig
from kedge.config.removed import REMOVED
from kedge.config.rloo import RLOOConfig
from kedge.config.support import UNKNOWN, Honoured, Ignored, Moved, Refused

HEAD = """\
# Options of {trainer}

Every field of `kedge.{config}`, which is `transformers.TrainingArguments` with those of {name}.
Each one acts, hands its value to another name, or is refused when it is set away from its default.
A few that cannot change what is trained are accepted without effect, with a warning.  On the
command line a field `name` is `--name VALUE`; a yes-or-no field is `--name` and `--no_name`.
`max_steps`, `logging_steps`, `save_steps`, `eval_steps` and `warmup_steps` count updates: one batch
of responses each.

This page is made by `python -m kedge.config.reference docs/reference`,
here with transformers {version}.
"""


# Sections of the page in order, and how ``Honoured.where`` begins for their fields.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Learning": ("algorithm", "KL controller", "value model", "learner"),
    "Batches and length of the run": ("plan",),
    "Sampling": ("sampling", "rows at a time"),
    "Rewards and prompts": ("rewards", "prompts"),
    "Evaluation, logs and checkpoints": (
        *("evaluation", "cadence", "trackers", "checkpoints", "train()", "hub", "progress bar"),
    ),
    "Models": ("models", "loading", "command line and scripts"),
    "Loop and rollout engine": ("engine", "loop", "rollout engine"),
    "Process and everything else": ("",),
}

CONFIGS: dict[str, type[OnPolicyConfig]] = {
    "ppo_config.md": PPOConfig,
    "async_ppo_config.md": AsyncPPOConfig,
    "rloo_config.md": RLOOConfig,
    "grpo_config.md": GRPOConfig,
}


def options_page(config: type[OnPolicyConfig]) -> str:
    """The whole page of one config, in Markdown."""
    name = config.__name__.removesuffix("Config")
    inherited = {f.name for f in fields(TrainingArguments)}
    acting: dict[str, list[str]] = {title: [] for title in SECTIONS}
    refused: list[str] = []
    older: list[str] = []
    ignored: list[str] = []
    for field in sorted(fields(config), key=lambda f: f.name in inherited):
        support = config.SUPPORT.get(field.name, UNKNOWN)
        if isinstance(support, Honoured):
            acting[_section(support.where)].append(_honoured(field, support))
        elif isinstance(support, Moved):
            older.append(f"| `{field.name}` | `{support.to}` |")
        elif isinstance(support, Ignored):
            ignored.append(f"| `{field.name}` | {support.reason} |")
        elif field.name not in REMOVED:
            refused.append(f"| `{field.name}` | {support.reason} | {support.way_out} |")
    gone = [_gone(name, each) for name, each in REMOVED.items() if isinstance(each, Refused)]
    return "\n".join(
        [
            HEAD.format(
                trainer=name + "Trainer",
                config=config.__name__,
                name=name,
                version=transformers.__version__,
            ),
            *(
                line
                for title, rows in acting.items()
                for line in _table(title, "| field | default | meaning | acts in |", rows)
            ),
            *_table("Fields that are refused", "| field | why | instead |", refused),
            *_table("Fields without effect", "| field | why |", ignored),
            *_table("Other names", "| field | acts as |", older),
            *_table("Older fields that are refused", "| field | why | instead |", gone),
        ]
    )


def _section(where: str) -> str:
    return next(title for title, begins in SECTIONS.items() if where.startswith(begins))


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
    from pathlib import Path

    for file, each in CONFIGS.items():
        (Path(sys.argv[1]) / file).write_text(options_page(each), encoding="utf-8")
