"""The report of a run: one self-contained HTML page that loads nothing from the network."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.reporting.doctor import examine, open_question
from kedge.reporting.log import RunLog, log_file, read_options, read_rows, read_table
from kedge.reporting.run_info import read_run_info
from kedge.reporting.story import episodes, story, vocabulary

TOKENS = "tokens"
SCRIPTS = (
    *("core.js", "list.js", "charts.js", "overview.js", "curves.js"),
    *("completions.js", "tokens.js", "main.js"),
)
Row = dict[str, Any]


def gather(
    run: str | Path, *, meanings: Mapping[str, str], prefixes: Mapping[str, str], most: int = 5000
) -> dict[str, Any]:
    """All data of the report page, as JSON values.

    Args:
        run: the run's ``output_dir``, or its ``metrics.jsonl``.
        meanings: metric name -> description.
        prefixes: prefix of metric names -> description.
        most: maximum responses per table kind; beyond it every step is truncated equally.

    Damaged lines are skipped, with a warning that counts them.
    """
    folder = log_file(run).absolute().parent
    rows = read_rows(run)
    if not rows:
        raise DataError(
            f"{log_file(run)} has no readable row; wait until the run has logged an iteration"
        )
    rows = [{k: x for k, x in row.items() if not k.startswith("train_")} for row in rows]
    training = [row for row in rows if "objective/scores" in row]
    log = RunLog(folder.name, training, **read_options(folder))
    tables = {
        name: _read_tables(folder / name, most)
        for name in sorted(p.name for p in folder.glob("*completions") if p.is_dir())
    }
    tokens = _read_tables(folder / TOKENS, most)
    for table in tokens:
        table["rows"] = [row for row in table["rows"] if _has_lists(row)]
    series: dict[str, dict[str, list[float]]] = {}  # steps and finite values of every metric
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "epoch") and math.isfinite(value):
                line = series.setdefault(name, {"x": [], "y": []})
                line["x"].append(int(row.get("step", 0)))
                line["y"].append(float(f"{value:.6g}"))
    axis = {int(r["step"]): int(r["episode"]) for r in rows if "episode" in r and "step" in r}
    return {
        "name": folder.name,
        "about": read_run_info(folder),
        "updates": len(log.rows),
        "findings": [asdict(finding) for finding in examine(log)],
        "unseen": open_question(log),
        "story": story(log, rows),
        "vocabulary": vocabulary(tokens),
        "played": episodes(tokens),
        "series": series,
        "meanings": {name: meaning(name, meanings, prefixes) for name in series},
        "episodes": {"x": [0, *axis], "y": [0, *axis.values()]},  # responses up to each iteration
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
        for metric in known:
            if metric.startswith("eval_"):
                return meanings[metric]
        if known:
            return f"{meanings[max(known, key=len)]}; on the evaluation prompts"
        name = f"eval_{name[name.rindex('pass@') :]}" if "pass@" in name else name
    return next((text for prefix, text in prefixes.items() if name.startswith(prefix)), "")


def _read_tables(folder: Path, most: int) -> list[Row]:
    """The tables of a folder ordered by step: ``{"step", "rows"}``."""
    tables = {}
    for file in folder.glob("step-*.jsonl"):
        step = file.stem.removeprefix("step-")
        if step.isdecimal() and file.is_file():
            tables[int(step)] = read_table(file)
    share = most
    if sum(map(len, tables.values())) > most:
        share = max(1, most // len(tables))
    return [{"step": n, "rows": tables[n][:share]} for n in sorted(tables) if tables[n]]


def _has_lists(row: Mapping[str, Any]) -> bool:
    """Whether a row has a list of tokens, and of values per token."""
    names = ("tokens", "advantage", "trained", "turn", "turn_rewards")
    return "tokens" in row and all(isinstance(row[name], list) for name in names if name in row)


def page(data: Mapping[str, Any]) -> str:
    """The HTML page for the result of ``gather``.

    The data are compressed JSON in base64, so that generated text cannot end the script or become
    markup; a content security policy blocks all connections.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    packed = gzip.compress(text.encode(errors="backslashreplace"), compresslevel=5, mtime=0)
    body = _asset("page.html")
    for name, text in {
        "title": escape(str(data["name"])),
        "style": _asset("page.css"),
        "script": "\n".join(map(_asset, SCRIPTS)),
        "data": base64.b64encode(packed).decode(),
    }.items():
        body = body.replace(f"<!--{name}-->", text)
    return body


def _asset(name: str) -> str:
    return (files("kedge.reporting") / "assets" / name).read_text(encoding="utf-8")
