"""Collects the files of a run for the report page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.reporting.doctor import examine, unseen
from kedge.reporting.log import RunLog, Skipped, log_file, read_options, read_rows, read_table
from kedge.reporting.run_info import FILE, read_run_info
from kedge.reporting.story import episodes, story, vocabulary

TOKENS = "tokens"
Row = dict[str, Any]


def gather(
    place: str | Path,
    *,
    meanings: Mapping[str, str],
    prefixes: Mapping[str, str],
    most: int = 5000,
) -> dict[str, Any]:
    """All data of the report page, as JSON values.

    Args:
        place: the run's ``output_dir``, or its ``metrics.jsonl``.
        meanings: metric name -> description.
        prefixes: prefix of metric names -> description.
        most: maximum responses per table kind; beyond it every step is truncated equally.

    Damaged lines are skipped, with one warning that counts them.
    """
    folder, skipped = log_file(place).absolute().parent, Skipped()
    rows = read_rows(place, skipped)
    if not rows:
        skipped.warn()
        raise DataError(
            f"{log_file(place)} has no readable row; wait until the run has logged an iteration"
        )
    rows = [{k: x for k, x in row.items() if not k.startswith("train_")} for row in rows]
    training = [row for row in rows if "objective/scores" in row]
    log = RunLog(folder.name, training, **read_options(folder))
    tables = {
        name: _read_tables(folder / name, most, skipped)
        for name in sorted(p.name for p in folder.glob("*completions") if p.is_dir())
    }
    tokens = _read_tables(folder / TOKENS, most, skipped, _is_token_row)
    about = read_run_info(folder)
    skipped[folder / FILE] += (folder / FILE).is_file() and not about
    skipped.warn()
    series = _metric_series(rows)
    axis = {int(r["step"]): int(r["episode"]) for r in rows if "episode" in r and "step" in r}
    return {
        "name": folder.name,
        "about": about,
        "updates": len(log.rows),
        "findings": [asdict(finding) for finding in examine(log)],
        "unseen": unseen(log),
        "story": story(log, rows),
        "vocabulary": vocabulary(tokens),
        "played": episodes(tokens),
        "series": series,
        "meanings": {name: meaning(name, meanings, prefixes) for name in series},
        "episodes": {"x": [0, *axis], "y": [0, *axis.values()]},  # responses seen by an iteration
        "tables": {name: table for name, table in tables.items() if table},
        "tokens": tokens,
    }


def meaning(name: str, meanings: Mapping[str, str], prefixes: Mapping[str, str]) -> str:
    """Description of a metric; "" if unknown.

    Evaluation metrics (``eval_...``, ``eval_<set>_...``) use that of the underlying metric.
    """
    if name in meanings:
        return meanings[name]
    if name.startswith("eval_"):
        known = [m for m in meanings if name.endswith(f"_{m.removeprefix('eval_')}")]
        known = [m for m in known if m.startswith("eval_")] or known
        if known and known[0].startswith("eval_"):
            return meanings[known[0]]
        if known:
            return f"{meanings[max(known, key=len)]}; on the evaluation prompts"
        name = f"eval_{name[name.rindex('pass@') :]}" if "pass@" in name else name
    matches = [text for prefix, text in prefixes.items() if name.startswith(prefix)]
    return matches[0] if matches else ""


def _metric_series(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Steps and finite values of every metric."""
    series: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "epoch") and math.isfinite(value):
                line = series.setdefault(name, {"x": [], "y": []})
                line["x"].append(int(row.get("step", 0)))
                line["y"].append(float(f"{value:.6g}"))
    return series


def _read_tables(
    folder: Path, most: int, skipped: Skipped, sound: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """The tables of a folder ordered by step: ``{"step", "rows"}``."""
    named = {file: file.stem.removeprefix("step-") for file in folder.glob("step-*.jsonl")}
    files = {int(step): file for file, step in named.items() if step.isdecimal() and file.is_file()}
    tables: list[Row] = []
    for step in sorted(files):
        rows = read_table(files[step], skipped)
        kept = [row for row in rows if sound(row)]
        skipped[files[step]] += len(rows) - len(kept)
        tables.append({"step": step, "rows": kept})
    count = sum(len(table["rows"]) for table in tables)
    if count > most:
        share = max(1, most // len(tables))
        for table in tables:
            table["rows"] = table["rows"][:share]
    return [table for table in tables if table["rows"]]


def _is_token_row(row: Row) -> bool:
    """Whether a row has a list of token texts, and valid lists of numbers where it has any."""
    tokens = row.get("tokens")
    numbers = [row.get(name, []) for name in ("advantage", "trained", "turn", "turn_rewards")]
    return (
        isinstance(tokens, list)
        and all(isinstance(text, str) for text in tokens)
        and all(isinstance(values, list) for values in numbers)
        and all(x is None or isinstance(x, int | float) for values in numbers for x in values)
    )
