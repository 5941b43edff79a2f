"""Results of the judge stages of a pipeline, over all seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge.cli.pipeline.stages import Stage
from kedge.judges.match import interval, worth


def results(runs: Sequence[tuple[Path, Iterable[Stage]]]) -> list[dict[str, Any]]:
    """One row for each judge stage: means, intervals and sums over the seeds.

    Args:
        runs: for each seed its folder and its stages, which are the same for all.
    """
    rows = []
    for stage in runs[0][1]:
        if stage.command != "judge":
            continue
        places = [folder / stage.name for folder, _ in runs]
        summaries = [json.loads((place / "summary.json").read_text()) for place in places]
        outcomes = [
            [
                worth(json.loads(line)["outcome"])
                for line in (place / "judgments.jsonl").read_text(encoding="utf-8").split("\n")
                if line.strip()
            ]
            for place in places
        ]
        low, high = interval([[x for x in values if x is not None] for values in outcomes])
        rates = [one["win_rate"] for one in summaries]
        controlled = [one["length_controlled_win_rate"] for one in summaries]
        rows.append(
            {
                "stage": stage.name,
                "judge": summaries[0]["judge"],
                "win_rate": fmean(rates),
                "win_rate_low": low,
                "win_rate_high": high,
                "each": rates,
                "length_controlled_win_rate": None if None in controlled else fmean(controlled),
                "prompts": sum(one["prompts"] for one in summaries),
                "invalid": sum(one["invalid"] for one in summaries),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    seeds = len(rows[0]["each"])
    title = "win rates" if seeds == 1 else f"win rates, mean of {seeds} seeds"
    table = Table("stage", "win rate", "95%", "at equal length", title=title, title_justify="left")
    if seeds > 1:
        table.add_column("each seed")
    for row in rows:
        controlled = row["length_controlled_win_rate"]
        cells = [
            row["stage"],
            f"{row['win_rate']:.1%}",
            f"{row['win_rate_low']:.1%} .. {row['win_rate_high']:.1%}",
            "-" if controlled is None else f"{controlled:.1%}",
        ]
        table.add_row(*cells, *([", ".join(f"{x:.1%}" for x in row["each"])] if seeds > 1 else []))
    Console().print(table)
