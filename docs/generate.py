"""Writes the generated pages and tables of the documentation.

python docs/generate.py        rewrites docs/reference, the tables in docs/algorithms, and the
                               flags that `kedge ppo --help` shows
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from transformers import TrainingArguments

from kedge.algorithms import BUILTIN
from kedge.cli import quick
from kedge.cli.arguments import FIRST
from kedge.cli.ppo import parser
from kedge.config.base import OnPolicyConfig
from kedge.config.declare import NoEffect, Unsupported, default_of, status
from kedge.config.dialect import Alias
from kedge.config.grpo import GRPOConfig
from kedge.config.ppo import PPOConfig
from kedge.config.rloo import RLOOConfig
from kedge.ext.open_instruct.config import AsyncPPOConfig
from kedge.ext.open_instruct.trainer import OPEN_INSTRUCT_NAMES
from kedge.ext.trl import options as trl
from kedge.loop.metrics import NAMES, PREFIXES, TRL_NAMES
from kedge.trainers import TRAINERS

Row = tuple[str, ...]  # a name, and the words after the columns
Cells = dict[str, str]  # trainer -> its cell

# Metrics of every algorithm, and those of a single one with its default options.
OF_ALL_ALGORITHMS = (
    *("objective/scores", "objective/scores_std", "objective/rlhf_reward"),
    *("objective/non_score_reward", "objective/kl", "objective/kl2", "objective/kl3"),
    *("objective/kl_coef", "objective/entropy"),
    *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg"),
    *("policy/ratio_min", "policy/ratio_p01", "policy/ratio_p99", "policy/ratio_max"),
    *("val/ratio", "val/ratio_var", "val/num_eos_tokens", "val/advantage_std"),
)
OF_ALGORITHM: dict[str, tuple[str, ...]] = {
    "ppo": (
        *("policy/policykl_avg", "loss/value_avg", "val/clipfrac_avg"),
        *("val/explained_variance", "val/value_mean", "val/return_mean"),
        "val/raw_advantage_std",
    ),
    "rloo": (
        *("clip_ratio/low_mean", "clip_ratio/high_mean"),
        *("objective/uniform_groups", "rollout/untrained_rows", "val/clipfrac_avg"),
    ),
    "reinforce_pp": ("loss/kl_avg", "objective/uniform_groups"),
    "grpo": (
        *("clip_ratio/low_mean", "clip_ratio/high_mean"),
        *("loss/kl_avg", "objective/uniform_groups"),
        *("rollout/untrained_rows", "rollout/resampled_groups"),
    ),
    "remax": ("objective/greedy_scores",),
}
OPEN_INSTRUCT_METRICS = {
    "training_step": "number of finished iterations",
    "objective/loss": "loss/policy_avg + vf_coef x loss/value_avg",
    "objective/verifiable_correct_rate": "share of responses that a verifier scored above 0",
    "val/format_scores": "weighted rewards of r1_style_format",
    **{n: x for n, x in OPEN_INSTRUCT_NAMES.items() if n.startswith("val/")},
    "val/stop_token_rate": "share of terminated responses",
    "time/training": "seconds of this iteration that were not spent waiting for samples",
    "time/from_scratch": "seconds since training began in this process",
}
OF_VERIFIERS = {
    "objective/<verifier>_reward": "mean score from a verifier over the responses that it scored",
    "objective/<verifier>_correct_rate": "share of those responses with a score above 0",
}
TRL_NOTES = {
    "reward_std": "objective/scores_std, with n - 1 in place of n",
    "kl": "loss/kl_avg; RLOO: objective/kl per token",
    "policy_loss": "the loss without the entropy bonus",
    "rewards/<function>/mean": "rewards/<function>",
    "<name>": "log/<name>: logged by a reward function through log_metric",
}

METRICS_HEAD = """# Metrics

One row is logged every `logging_steps` iterations. It contains the means of the metrics over the
iterations since the last row. Each metric of an iteration is computed over the whole batch on all
processes, without padding. Rows are printed, written to `metrics.jsonl`, kept in
`trainer.state.log_history`, and sent to the trackers that `report_to` names.

| metric | meaning |
|---|---|
"""

SEED_METRICS_HEAD = """
## Metrics of asynchronous PPO

`kedge async-ppo` also logs these metrics, under open-instruct's names.

| metric | meaning |
|---|---|
"""


TRL_HEAD = """
## Under TRL's names

`GRPOTrainer` and `RLOOTrainer` also log these metrics, in training and, with the prefix `eval_`, in
evaluations. Two kinds of TRL's metrics are not logged. `clip_ratio/low_min` and
`clip_ratio/high_max` are extremes over micro-batches, whose size in Kedge depends only on memory.
`total_flos` is missing because the operations for sampling and scoring are not counted.

| TRL | Kedge |
|---|---|
"""


def metrics_page() -> str:
    """The page as Markdown."""
    parts = [NAMES | {f"{prefix}...": text for prefix, text in PREFIXES.items()}]
    parts += [OPEN_INSTRUCT_METRICS | OF_VERIFIERS, TRL_NAMES | TRL_NOTES]
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
    lines = ["| option | default | meaning |", "|---|---|---|"]
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
    return "\n".join(["| metric | meaning |", "|---|---|", *rows])


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
# Options

This page lists every field of `kedge.PPOConfig`, `AsyncPPOConfig`, `RLOOConfig` and `GRPOConfig`,
which extend `transformers.TrainingArguments`. It also lists the names that exist only in
`kedge.trl.RLOOConfig` and `kedge.trl.GRPOConfig`. Each column shows the default in one config, and
a dash means that the config does not have the field. On the command line, a field `name` is set
with `--name VALUE`, and a yes-or-no field with `--name` or `--no_name`. `max_steps`,
`logging_steps`, `save_steps`, `eval_steps` and `warmup_steps` count iterations, each of which
samples and trains on one batch of responses.

`python docs/generate.py` generates this page, here with transformers {version}.
"""

REFUSED_TEXT = """\
These names are accepted only with their default values; other values raise an error."""

IGNORED_TEXT = """\
These names are accepted but have no effect, and a line in the log says so."""


# Sections of the page in order: those of the fields.
SECTIONS: dict[str, tuple[str, ...]] = {
    "What most runs set": (),  # the fields that `kedge ppo --help` shows
    "Learning": ("algorithm", "KL and entropy", "value model", "reference", "learner"),
    "Batches and length of the run": ("batch sizes and run length",),
    "Sampling": ("sampling",),
    "Rewards, prompts and environments": ("rewards", "prompts", "environments"),
    "Evaluation, logs and checkpoints": ("evaluation and logs", "checkpoints and hub"),
    "Models": ("models", "command line and scripts"),
    "Loop and rollout engine": ("engine", "rollout engine"),
    "Process": ("process",),
    "Asynchronous PPO": ("asynchronous PPO",),
    "TRL options that set other options": ("names of TRL",),
}

CONFIGS: dict[str, type[OnPolicyConfig]] = {
    "PPO": PPOConfig,
    "async PPO": AsyncPPOConfig,
    "RLOO": RLOOConfig,
    "GRPO": GRPOConfig,
    "TRL's RLOO": trl.RLOOConfig,
    "TRL's GRPO": trl.GRPOConfig,
}


def options_page() -> str:
    """The page of all configs, in Markdown."""
    acting: dict[str, dict[Row, Cells]] = {title: {} for title in SECTIONS}
    named: dict[type, dict[Row, Cells]] = {kind: {} for kind in (Unsupported, NoEffect, Alias)}
    inherited = {f.name for f in fields(TrainingArguments)}
    for column, config in CONFIGS.items():
        for field in sorted(fields(config), key=lambda f: f.name in inherited):
            where, name = status(config, field.name), field.name
            if isinstance(where, str):
                first = name in FIRST and where != "command line and scripts"
                title = "What most runs set" if first else _section_reference(where)
                text = " ".join(str(field.metadata.get("help", "")).split())
                shown = default_of(field)
                shown = f"`{getattr(shown, 'value', shown)!r}`"
                acting[title].setdefault((name, text), {})[column] = shown
                continue
            if isinstance(where, Alias):
                row: Row = (f"`{where.target}`",)
            else:
                way_out = (where.way_out,) if isinstance(where, Unsupported) else ()
                row = (where.reason, *way_out)
            named[type(where)].setdefault((name, *row), {})[column] = "yes"
    first_rows = acting["What most runs set"]
    acting["What most runs set"] = dict(
        sorted(first_rows.items(), key=lambda item: FIRST.index(item[0][0]))
    )
    columns = " | ".join(CONFIGS)
    return "\n".join(
        [
            OPTIONS_HEAD.format(version=transformers.__version__),
            *(
                line
                for title, rows in acting.items()
                for line in _table_reference(title, f"| field | {columns} | meaning |", rows)
            ),
            *_table_reference(
                "Names that are not supported",
                f"| name | {columns} | why | instead |",
                named[Unsupported],
                REFUSED_TEXT,
            ),
            *_table_reference(
                "Names without effect",
                f"| name | {columns} | why |",
                named[NoEffect],
                IGNORED_TEXT,
            ),
            *_table_reference("Other names", f"| name | {columns} | acts as |", named[Alias]),
        ]
    )


def _section_reference(where: str) -> str:
    return next(title for title, begins in SECTIONS.items() if where in begins)


def _table_reference(
    title: str, head: str, rows: dict[Row, Cells], text: str | None = None
) -> list[str]:
    lines = []
    for (name, *rest), cells in rows.items():
        columns = (cells.get(column, "-") for column in CONFIGS)
        words = (word.replace("|", "\\|") for word in rest)
        lines.append(f"| `{name}` | " + " | ".join([*columns, *words]) + " |")
    opening = [f"## {title}", ""] + ([text, ""] if text else [])
    return [*opening, head, "|---" * (head.count("|") - 1) + "|", *lines, ""]


def command_flags() -> str:
    """The flags and help texts of the commands that train, as JSON; at 80 columns."""
    flags, texts, nullable = {}, {}, {}
    for command in TRAINERS:
        texts[command] = {"first": _help(command), "all": _help(command, "all")}
        full = parser(command)
        flags[command], nullable[command] = quick.describe(full), sorted(full.nullable)
    found = {"transformers": transformers.__version__, "help": texts, "flags": flags}
    own = {f.name: default_of(f) for f in fields(OnPolicyConfig) if f.init}
    theirs = [f.name for f in fields(TrainingArguments) if f.init]
    found |= {"nullable": nullable, "inherited": {name: own[name] for name in theirs}}
    every = [*TRAINERS, "async-ppo"]
    found["options"] = {name: sorted({a.dest for a in parser(name)._actions}) for name in every}
    return json.dumps(found, ensure_ascii=False).replace("}], [[", "}],\n[[") + "\n"


def _help(command: str, *words: str) -> str:
    text = io.StringIO()
    with redirect_stdout(text), mock.patch.dict(os.environ, COLUMNS="80"):
        parser(command).show_help(["--help", *words])
    return text.getvalue().rstrip()


def main() -> None:
    """Rewrite everything that is generated, in place."""
    quick.FILE.write_text(command_flags(), encoding="utf-8")
    docs = Path(__file__).parent
    (docs / "reference" / "metrics.md").write_text(metrics_page(), encoding="utf-8")
    (docs / "reference" / "options.md").write_text(options_page(), encoding="utf-8")
    write_algorithm_pages(str(docs / "algorithms"))


if __name__ == "__main__":
    main()
