"""``kedge demo``: a task, a supervised model, a reward model, PPO, and an evaluation, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# Models this small gain little from a second thread, and get much slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.table import Table

from kedge.cli.flags import Flags, print_table
from kedge.cli.tools import pipeline
from kedge.demo.task import gold
from kedge.output import write_jsonl
from kedge.records.errors import ConfigError, install_command
from kedge.reporting.log import read_log, read_objects

JUDGMENTS = ("judged-sft", "judged-ppo", "ppo-against-sft")
QUICK = ("supervised=640", "compared=128", "episodes=192", "judged=32", "epochs=1")

DESCRIPTION = """\
Train a small model to summarize posts, from nothing, in about four minutes on one CPU core:
supervised training, a reward model from preferences, PPO, and a judge that training never sees."""

console = Console()


def main(argv: Sequence[str]) -> None:
    """Run the stages of pipeline.yaml and print the results; all outputs go to one folder."""
    flags = Flags("kedge demo", DESCRIPTION)
    flags.add_argument("--output_dir", default="runs/demo")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--quick", action="store_true", help="little training, as a smoke test")
    args = flags.parse_args(list(argv))
    if importlib.util.find_spec("trl") is None:
        raise ConfigError(
            "kedge demo needs TRL for its supervised and reward models; install it with"
            f" {install_command('demo')}"
        )
    warnings.filterwarnings("ignore", category=FutureWarning)
    folder, begin = Path(args.output_dir), time.perf_counter()
    values = [f"folder={folder}", f"seed={args.seed}", *(QUICK if args.quick else ())]
    stages = str(Path(__file__).with_name("pipeline.yaml"))
    pipeline.main([stages, "--only", "exchanges", *JUDGMENTS, "--set", *values])
    summary = summarize(folder)
    summary["seconds"] = round(time.perf_counter() - begin, 1)
    if (folder / "summary.json").is_file() and summary["seconds"] < 10:
        console.print(f"All stages were already complete; remove {folder} to run them again.")
        summary["seconds"] = json.loads((folder / "summary.json").read_text())["seconds"]
    show(folder)
    show_result(summary, folder)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def summarize(folder: Path) -> dict[str, float]:
    """Collect the numeric results of the run."""
    metrics = read_log(folder / "ppo").rows
    first, last = metrics[:2], metrics[-3:]
    before, after, between = (
        json.loads((folder / name / "summary.json").read_text()) for name in JUDGMENTS
    )
    held_out = read_objects(folder / "data" / "held_out.jsonl")
    references = gold([row["prompt"] for row in held_out], [row["completion"] for row in held_out])
    return {
        "score_start": mean(row["objective/scores"] for row in first),
        "score_end": mean(row["objective/scores"] for row in last),
        "kl": mean(row["objective/kl"] for row in last),
        "win_rate_start": round(before["win_rate"], 4),
        "win_rate": round(after["win_rate"], 4),
        "win_rate_low": round(after["win_rate_low"], 4),
        "win_rate_high": round(after["win_rate_high"], 4),
        "win_rate_perfect": mean(0.5 if score > 0.999 else 1.0 for score in references),
        "win_rate_head_to_head": round(between["win_rate"], 4),
        "episodes_per_second": round(metrics[-1]["eps"], 1),
    }


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
        f"{summary['seconds']:.0f} seconds. Models, curves and completions are in {folder};"
        f" `kedge report {folder}/ppo` writes a report page of the run."
    )


def mean(values: Any) -> float:
    """The mean, rounded to four decimals."""
    numbers = list(values)
    return round(sum(numbers) / len(numbers), 4)
