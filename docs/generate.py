"""Writes the generated pages and tables of the documentation.

python docs/generate.py        rewrites docs/reference, the tables in docs/algorithms and the help
                               of the commands that train (src/kedge/cli/help)
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from transformers import TrainingArguments

from kedge.algorithms import BUILTIN
from kedge.cli.flags import FOLDER
from kedge.cli.main import load_command
from kedge.config.async_ppo import AsyncPPOConfig
from kedge.config.base import OnPolicyConfig
from kedge.config.compat.transformers4 import TRANSFORMERS4
from kedge.config.declare import Alias, NoEffect, Unsupported, default_of, status
from kedge.config.grpo import GRPOConfig
from kedge.config.options import foreign
from kedge.config.ppo import PPOConfig
from kedge.config.rloo import RLOOConfig
from kedge.engine.metrics import (
    NAMES,
    OF_ALGORITHM,
    OF_ALL_ALGORITHMS,
    PREFIXES,
    SEED_NAMES,
    SEED_PREFIXES,
    TRL_NAMES,
    TRL_NOTES,
)

METRICS_HEAD = """# Metrics

One row is logged every `logging_steps` updates: the mean over the updates since the last row, of
values that are already means over the whole batch of all processes, real tokens only. Rows are in
`trainer.state.log_history`, in `metrics.jsonl`, on screen and wherever `report_to` says.

| metric | meaning |
|---|---|
"""

SEED_METRICS_HEAD = """
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


def metrics_page() -> str:
    """The page as Markdown."""
    parts = [NAMES | {f"{prefix}...": text for prefix, text in PREFIXES.items()}]
    parts += [SEED_NAMES | SEED_PREFIXES, TRL_NAMES | TRL_NOTES]
    tables = [
        "".join(f"| `{n}` | {_cell_metrics(x)} |\n" for n, x in part.items()) for part in parts
    ]
    return "".join(
        h + t for h, t in zip((METRICS_HEAD, SEED_METRICS_HEAD, TRL_HEAD), tables, strict=True)
    )


def _cell_metrics(text: str) -> str:
    return text.replace("|", "\\|")


def options_table(rule: Callable[..., Any]) -> str:
    """Every option of a rule: name, default, what it does."""
    said = described(rule)
    lines = ["| option | default | |", "|---|---|---|"]
    for name, parameter in inspect.signature(rule).parameters.items():
        lines.append(f"| `{name}` | `{parameter.default!r}` | {said[name]} |")
    return "\n".join(lines)


def described(rule: Callable[..., Any]) -> dict[str, str]:
    """``name -> text`` of the docstring's Args."""
    text = inspect.cleandoc(rule.__doc__ or "")
    _, _, after = text.partition("Args:\n")
    block = re.split(r"\n\s*\n", after, maxsplit=1)[0]
    found: dict[str, str] = {}
    for part in re.split(r"\n {4}(?=\w+: )", "\n" + block.rstrip()):
        name, colon, words = part.strip().partition(": ")
        if colon:
            found[name] = " ".join(words.split()).replace("``", "`")
    return found


def metrics_table(rule: str) -> str:
    """Every metric that a rule logs of an update: name, what it means."""
    names = [*OF_ALL_ALGORITHMS, *OF_ALGORITHM[rule]]
    rows = [
        f"| `{name}` | {NAMES[name].replace('|', chr(92) + '|')} |"
        for name in NAMES
        if name in names
    ]
    return "\n".join(["| metric | |", "|---|---|", *rows])


def renewed(page: str, rule: str) -> str:
    """The page with its tables generated again.

    Raises:
        ValueError: it has no place for one of them.
    """
    tables = {"options": options_table(BUILTIN[rule]), "metrics": metrics_table(rule)}
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if not (begin in page and end in page):
            raise ValueError(f"{rule}: the page has no {begin} ... {end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


def write_algorithm_pages(folder: str) -> None:
    """Rewrite the tables of every page in ``folder``."""
    for name in BUILTIN:
        file = Path(folder) / f"{name}.md"
        file.write_text(renewed(file.read_text(encoding="utf-8"), name), encoding="utf-8")


OPTIONS_HEAD = """\
# Options of {trainer}

Every field of `kedge.{config}`, which is `transformers.TrainingArguments` with those of {name}, and
the names of other libraries and releases that it accepts. Names that are not supported may be given
with their default; away from it they are refused. Names without effect are accepted with a line in
the log. On the command line a field `name` is `--name VALUE`; a yes-or-no field is `--name` and
`--no_name`. `max_steps`, `logging_steps`, `save_steps`, `eval_steps` and `warmup_steps` count
iterations: one batch of responses each.

This page is made by `python docs/generate.py`,
here with transformers {version}.
"""


# Sections of the page in order, and how ``acts_in`` begins for their fields.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Learning": ("algorithm", "KL controller", "value model", "learner"),
    "Batches and length of the run": ("batch sizes",),
    "Sampling": ("sampling", "rows at a time"),
    "Rewards and prompts": ("rewards", "prompts"),
    "Evaluation, logs and checkpoints": (
        *("evaluation", "schedule", "trackers", "checkpoints", "train()", "hub", "progress bar"),
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


# Commands whose flags take seconds to import.
HELP = ("async-ppo", "grpo", "plan", "ppo", "reward", "rloo", "sft")


def options_page(config: type[OnPolicyConfig]) -> str:
    """The whole page of one config, in Markdown."""
    name = config.__name__.removesuffix("Config")
    inherited = {f.name for f in fields(TrainingArguments)}
    acting: dict[str, list[str]] = {title: [] for title in SECTIONS}
    names: dict[str, Any] = {}
    for field in sorted(fields(config), key=lambda f: f.name in inherited):
        where = status(config, field.name)
        if isinstance(where, str):
            acting[_section_reference(where)].append(_option_reference(field, where))
        else:
            names[field.name] = where
    names |= sorted(foreign(config).items(), key=lambda item: item[0] in TRANSFORMERS4)
    older = [f"| `{n}` | `{x.target}` |" for n, x in names.items() if isinstance(x, Alias)]
    ignored = [f"| `{n}` | {x.reason} |" for n, x in names.items() if isinstance(x, NoEffect)]
    refused = [
        f"| `{n}` | {x.reason} | {x.way_out} |"
        for n, x in names.items()
        if isinstance(x, Unsupported)
    ]
    return "\n".join(
        [
            OPTIONS_HEAD.format(
                trainer=name + "Trainer",
                config=config.__name__,
                name=name,
                version=transformers.__version__,
            ),
            *(
                line
                for title, rows in acting.items()
                for line in _table_reference(title, "| field | default | meaning | acts in |", rows)
            ),
            *_table_reference("Names that are not supported", "| name | why | instead |", refused),
            *_table_reference("Names without effect", "| name | why |", ignored),
            *_table_reference("Other names", "| name | acts as |", older),
        ]
    )


def _section_reference(where: str) -> str:
    return next(title for title, begins in SECTIONS.items() if where.startswith(begins))


def _option_reference(field: Field[Any], where: str) -> str:
    text = " ".join(str(field.metadata.get("help", "")).split()).replace("|", "\\|")
    shown = default_of(field)
    return f"| `{field.name}` | `{getattr(shown, 'value', shown)!r}` | {text} | {where} |"


def _table_reference(title: str, head: str, rows: list[str]) -> list[str]:
    return [f"## {title}", "", head, "|---" * (head.count("|") - 1) + "|", *rows, ""]


def help_text(command: str) -> str:
    """What ``kedge COMMAND --help`` prints, on lines of at most 80 characters."""
    text = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="80"), contextlib.redirect_stdout(text):
        load_command(command)(["--help"])
    return text.getvalue()


def main() -> None:
    """Rewrite everything that is generated, in place."""
    docs = Path(__file__).parent
    (docs / "reference" / "metrics.md").write_text(metrics_page(), encoding="utf-8")
    for file, config in CONFIGS.items():
        (docs / "reference" / file).write_text(options_page(config), encoding="utf-8")
    write_algorithm_pages(str(docs / "algorithms"))
    FOLDER.mkdir(exist_ok=True)
    for command in HELP:
        (FOLDER / f"{command}.txt").write_text(help_text(command), encoding="utf-8")


if __name__ == "__main__":
    main()
