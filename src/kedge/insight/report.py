"""What a run left in its folder, gathered for the page that shows it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.insight.doctor import examine
from kedge.insight.log import (
    RunLog,
    Skipped,
    fixed_length,
    log_file,
    read_rows,
    read_table,
)
from kedge.insight.story import story, vocabulary

TOKENS = "tokens"
Row = dict[str, Any]


def gather(
    place: str | Path,
    *,
    meanings: Mapping[str, str],
    prefixes: Mapping[str, str],
    most: int = 5000,
) -> dict[str, Any]:
    """Everything that the page shows, as JSON values.

    Args:
        place: the run's ``output_dir``, or its ``metrics.jsonl``.
        meanings: metric name -> what it means.
        prefixes: beginning of a name -> what metrics of that kind mean.
        most: responses of each kind that are shown; beyond it every step gives up equally many.

    What cannot be read is left out, with one warning that counts it.

    Raises:
        DataError: there is no log, or nothing in it can be read.
    """
    folder, skipped = log_file(place).absolute().parent, Skipped()
    rows = read_rows(place, skipped)
    if not rows:
        skipped.warn()
        raise DataError(f"{log_file(place)} holds no row that can be read: nothing was logged yet")
    rows = [row for row in rows if "train_runtime" not in row]  # the summary at the end
    training = [row for row in rows if "objective/scores" in row]
    log = RunLog(folder.name, training, fixed_length(folder))
    tables = {
        name: _tables(folder / name, most, skipped)
        for name in sorted(p.name for p in folder.glob("*completions") if p.is_dir())
    }
    tokens = _tables(folder / TOKENS, most, skipped, _is_token_row)
    about = _about(folder, skipped)
    skipped.warn()
    series = _series(rows)
    return {
        "name": folder.name,
        "about": about,
        "updates": len(log.rows),
        "findings": [asdict(found) for found in examine(log)],
        "story": story(log, rows),
        "vocabulary": vocabulary(tokens),
        "series": series,
        "meanings": {name: meaning(name, meanings, prefixes) for name in series},
        "episodes": _episodes(rows),
        "tables": {name: table for name, table in tables.items() if table},
        "tokens": tokens,
    }


def meaning(name: str, meanings: Mapping[str, str], prefixes: Mapping[str, str]) -> str:
    """What a metric means; "" for one that no table knows.

    An evaluation's (``eval_...``, ``eval_<set>_...``) is that of the metric it evaluates.
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
    found = [text for prefix, text in prefixes.items() if name.startswith(prefix)]
    return found[0] if found else ""


def _about(folder: Path, skipped: Skipped) -> dict[str, Any]:
    file = folder / "run.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=str)
    except (ValueError, OSError, RecursionError):
        found = None
    if not isinstance(found, dict):
        skipped.add(file)
        return {}
    return found


def _series(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Steps and values of every metric, values that are not finite left out."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "epoch") and math.isfinite(value):
                line = found.setdefault(name, {"x": [], "y": []})
                line["x"].append(int(row.get("step", 0)))
                line["y"].append(float(f"{value:.6g}"))
    return found


def _episodes(rows: Sequence[Mapping[str, float]]) -> dict[str, list[int]]:
    """Which update had seen how many responses, for the other axis."""
    known = {int(r["step"]): int(r["episode"]) for r in rows if "episode" in r and "step" in r}
    return {"x": [0, *known], "y": [0, *known.values()]}


def _tables(
    folder: Path, most: int, skipped: Skipped, sound: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """The tables of a folder in order of their steps: ``{"step", "rows"}``."""
    named = {file: file.stem.removeprefix("step-") for file in folder.glob("step-*.jsonl")}
    files = {int(step): file for file, step in named.items() if step.isdecimal() and file.is_file()}
    found: list[Row] = []
    for step in sorted(files):
        rows = read_table(files[step], skipped)
        kept = [row for row in rows if sound(row)]
        skipped.add(files[step], len(rows) - len(kept))
        found.append({"step": step, "rows": kept})
    count = sum(len(each["rows"]) for each in found)
    if count > most:
        share = max(1, most // len(found))
        for each in found:
            each["rows"] = each["rows"][:share]
    return [each for each in found if each["rows"]]


def _is_token_row(row: Row) -> bool:
    """Whether it has texts of tokens, and for each of them a number or nothing."""
    tokens, advantages = row.get("tokens"), row.get("advantage", [])
    return (
        isinstance(tokens, list)
        and all(isinstance(text, str) for text in tokens)
        and isinstance(advantages, list)
        and all(x is None or isinstance(x, int | float) for x in advantages)
    )
