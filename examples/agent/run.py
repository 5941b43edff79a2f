"""An agent in a text world, on a CPU: expert episodes, supervised start, PPO with a value model.

make demo-agent                            about eight minutes on two cores
python examples/agent/run.py --quick       the same with little training, as a smoke test

The policy sees one room at a time, and finds keys, doors and gold in 6 to 12 turns.  It starts
from episodes of a careless expert.  PPO then trains it on new worlds, with a reward of 1 for the
gold and nothing else.  Success is measured on worlds that neither stage has seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from agent import TASKS, Sizes, evaluate, supervise, train
from rich.console import Console
from rich.table import Table

from kedge.cli.main import run_command
from kedge.reporting.base import format_duration

QUICK = Sizes(expert_episodes=64, batch=8, iterations=3, evaluated=16)
console = Console()


def show_result(before: dict[str, Any], after: dict[str, Any], episodes: int) -> None:
    """Print the results in one table."""
    both = (before, after)
    shares = [f"{x['success']:.1%}  ({x['low']:.1%} .. {x['high']:.1%})" for x in both]
    result = Table("", "supervised", "PPO", title="result", title_justify="left")
    result.add_row(f"success on {episodes} new worlds", *shares)
    result.add_row("turns per episode", *(f"{x['turns']:.1f}" for x in both))
    result.add_row(
        "impossible actions per episode", *(f"{x['metrics'].get('illegal', 0):.1f}" for x in both)
    )
    console.print(result)


def main(argv: list[str]) -> None:
    """Train, evaluate, and write everything to a folder."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--output_dir", default="runs/agent", type=Path)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--quick", action="store_true", help="little training, as a smoke test")
    args = flags.parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    task, folder, sizes = TASKS["text world"], args.output_dir, QUICK if args.quick else Sizes()
    begin = time.perf_counter()

    console.rule("1. episodes of a careless expert, and the supervised model")
    supervise(task, folder, sizes, args.seed)
    before = evaluate(task, folder / "sft", sizes.evaluated, args.seed)
    console.print(f"success on {sizes.evaluated} new worlds: {before['success']:.1%}")

    console.rule("2. PPO, with a value model")
    middle = time.perf_counter()
    train(task, folder / "sft", folder / "ppo", sizes, args.seed)
    after = evaluate(task, folder / "ppo", sizes.evaluated, args.seed)
    now = time.perf_counter()
    summary = {
        "supervised": before,
        "ppo": after,
        "seconds": round(now - begin, 1),
        "seconds_ppo": round(now - middle, 1),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show_result(before, after, sizes.evaluated)
    console.print(
        f"{format_duration(summary['seconds'])}. Models, episodes and curves are in {folder};"
        f" `kedge report {folder}/ppo` writes a report page of the run."
    )


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], name="demo-agent"))
