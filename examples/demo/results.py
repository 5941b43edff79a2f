"""What a run of the demo has shown: its numbers, some summaries, and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table
from task import gold

from kedge.cli.flags import print_table
from kedge.ext.judge.judges import WORTH
from kedge.math.intervals import share_interval
from kedge.output import write_jsonl
from kedge.reporting.base import format_duration
from kedge.reporting.log import read_log, read_objects

JUDGMENTS = ("judged-sft", "judged-ppo", "ppo-against-sft")
console = Console()


def collect(folder: Path) -> dict[str, float]:
    """The numeric results of a run."""
    metrics = read_log(folder / "ppo").rows
    first, last = metrics[:2], metrics[-3:]
    before, after, between = (
        json.loads((folder / name / "summary.json").read_text()) for name in JUDGMENTS
    )
    held_out = read_objects(folder / "data" / "held_out.jsonl")
    references = gold([row["prompt"] for row in held_out], [row["completion"] for row in held_out])
    results = {
        "score_start": fmean(row["objective/scores"] for row in first),
        "score_end": fmean(row["objective/scores"] for row in last),
        "kl": fmean(row["objective/kl"] for row in last),
        "win_rate_start": before["win_rate"],
        "win_rate": after["win_rate"],
        "win_rate_low": after["win_rate_low"],
        "win_rate_high": after["win_rate_high"],
        "win_rate_perfect": fmean(0.5 if score > 0.999 else 1.0 for score in references),
        "win_rate_head_to_head": between["win_rate"],
        "episodes_per_second": round(metrics[-1]["eps"], 1),
    }
    return {name: round(value, 4) for name, value in results.items()}


def show(folder: Path) -> None:
    """Print some summaries before and after training, and write all to a file."""
    before, after = (
        read_objects(folder / f"summaries-{name}" / "completions.jsonl") for name in ("sft", "ppo")
    )
    table = Table("post", "supervised", "PPO", show_lines=True)
    lines = []
    for old, new in zip(before, after, strict=True):
        post, summaries = old["prompt"], (old["completion"].strip(), new["completion"].strip())
        scores = gold([post, post], list(summaries))
        line = {"post": post, "reference": old["reference"].strip()}
        line |= {"supervised": summaries[0], "supervised_mark": scores[0]}
        lines.append(line | {"ppo": summaries[1], "ppo_mark": scores[1]})
        if len(lines) <= 5:
            table.add_row(
                post, *(f"{s}\n[{m:.1f}]" for s, m in zip(summaries, scores, strict=True))
            )
    console.print(table)
    write_jsonl(folder / "completions.jsonl", lines)


def show_result(summary: dict[str, float], folder: Path) -> None:
    """Print the results in one table."""
    x = summary
    interval = f"{x['win_rate_low']:.1%} .. {x['win_rate_high']:.1%}"
    rows = [
        ("score of the reward model", f"{x['score_start']:.2f}", f"{x['score_end']:.2f}"),
        ("KL to the supervised model (nats per response)", "0", f"{x['kl']:.1f}"),
        (
            "gold win rate against the references",
            f"{x['win_rate_start']:.1%}",
            f"{x['win_rate']:.1%}  ({interval})",
        ),
        ("the same of perfect summaries (ties)", "", f"{x['win_rate_perfect']:.1%}"),
        ("gold win rate, PPO against supervised", "", f"{x['win_rate_head_to_head']:.1%}"),
        ("episodes per second", "", f"{x['episodes_per_second']:.1f}"),
    ]
    print_table("result", rows, ("", "supervised", "PPO"))
    console.print(
        f"The run took {format_duration(summary['seconds'])}. Models, curves and completions are in"
        f" {folder}; `kedge report {folder}/ppo` writes a report page of the run."
    )


def show_win_rates(folder: Path, seeds: Sequence[Path]) -> None:
    """Print the win rates of all seeds, with the 95% interval of their mean, and write them."""
    rows, cells = [], []
    for name in JUDGMENTS:
        rates = [json.loads((x / name / "summary.json").read_text())["win_rate"] for x in seeds]
        lines = (read_objects(x / name / "judgments.jsonl") for x in seeds)
        outcomes = [[WORTH[row["outcome"]] for row in rows] for rows in lines]
        low, high = share_interval(outcomes if len(seeds) > 1 else [[x] for x in outcomes[0]])
        rows.append(
            {"name": name, "win_rate": fmean(rates), "low": low, "high": high} | {"each": rates}
        )
        each = ", ".join(f"{x:.1%}" for x in rates)
        cells.append((name, f"{fmean(rates):.1%}", f"{low:.1%} .. {high:.1%}", each))
    title = "win rates" if len(seeds) == 1 else f"win rates, mean of {len(seeds)} seeds"
    print_table(title, cells, ("", "win rate", "95%", "each seed"))
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
