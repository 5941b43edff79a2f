"""The clock of a track: whole commands from a fixed start to a held-out target; see README.md.

python -m benchmarks.speedrun TRACK --title "what is new" [--seeds 0 1 2]
python -m benchmarks.speedrun text-world --title "no value warm-up" \
    --command "benchmarks/speedrun/fast_agent.py --output_dir @ --seed SEED"
python -m benchmarks.speedrun     rewrite the file that the board's page is drawn from
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.ppo_vs_trl.__main__ import processor

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records" / "speedrun"
ANSWERS = "--max_new_tokens 32 --temperature 0.7 --num_generations 4 --seed SEED"
CHAT = f"""\
-m kedge grpo --config examples/chat_model/chat.yaml --output_dir @/grpo --seed SEED
-m kedge generate @/grpo runs/chat/data/held_out.jsonl --output @/after.jsonl {ANSWERS}"""
# Commands, @ is a run's folder; the target; whether every seed must reach it instead of the mean.
TRACKS: dict[str, tuple[str, float, bool]] = {
    "text-world": ("examples/agent/run.py --output_dir @ --seed SEED", 0.6, False),
    "demo": ("examples/demo/run.py --output_dir @ --seeds SEED", 0.68, True),
    "chat": (CHAT, 0.5, False),
}
BOARD = ["track", "what is new", "held out, each seed", "wall s", "CPU s", "processor", "reached"]


def held_out(track: str, folder: Path) -> float:
    """The share that the target is about."""
    if track == "chat":  # answers that are right and as asked
        judge = runpy.run_path(str(ROOT / "examples" / "chat_model" / "score.py"))["judge"]
        return fmean(row["followed"] and row["named"] for row in judge(folder / "after.jsonl"))
    file = folder / ("judged-ppo" if track == "demo" else "") / "summary.json"
    summary = json.loads(file.read_text())
    return float(summary["ppo"]["success"] if track == "text-world" else summary["win_rate"])


def run(track: str, seed: int, commands: str) -> dict[str, Any]:
    """Wall clock and CPU seconds of a track's commands, and their result."""
    with tempfile.TemporaryDirectory() as folder:
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        for line in commands.splitlines():
            words = line.replace("@", folder).replace("SEED", str(seed)).split()
            env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}"}
            subprocess.run([sys.executable, "-W", "ignore", *words], cwd=ROOT, env=env, check=True)
        wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        result = round(held_out(track, Path(folder)), 4)
    return {"seed": seed, "held_out": result, "wall_s": round(wall, 1), "cpu_s": round(cpu, 1)}


def row(record: dict[str, Any]) -> list[str]:
    """A record as a row of the board."""
    runs, (_, target, every) = record["runs"], TRACKS[record["track"]]
    results = [run["held_out"] for run in runs]
    each = ", ".join(f"{100 * x:.1f}%" for x in results)
    reached = min(results) > target if every else fmean(results) >= target
    seconds = [f"{fmean(run[name] for run in runs):.0f}" for name in ("wall_s", "cpu_s")]
    words = [record["track"], record["title"], f"{100 * fmean(results):.1f}% ({each})", *seconds]
    return [*words, record["processor"], "yes" if reached else "no"]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    flags.add_argument("track", nargs="?", choices=list(TRACKS))
    flags.add_argument("--title", help="what is new in this record")
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument("--command", help="instead of the track's; @ is a run's folder")
    args = flags.parse_args()
    if args.track:
        commands = args.command or TRACKS[args.track][0]
        head = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.check_output(head, cwd=ROOT, text=True).strip()
        record = {
            **{"track": args.track, "title": args.title or commit, "command": commands},
            **{"commit": commit, "processor": processor()},
            **{"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]},
            "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
            "python": platform.python_version(),
            "runs": [run(args.track, seed, commands) for seed in args.seeds],
        }
        RECORDS.mkdir(exist_ok=True)
        number = 1 + len([*RECORDS.glob(f"{args.track}-*.json")])
        (RECORDS / f"{args.track}-{number}.json").write_text(json.dumps(record, indent=1) + "\n")
    records = [json.loads(file.read_text()) for file in sorted(RECORDS.glob("*.json"))]
    rows = [row(record) for record in records]
    rows += [
        [track, "not run", *["-"] * 5] for track in TRACKS if track not in [r[0] for r in rows]
    ]
    table = {"tables": {"board": {"columns": BOARD, "rows": rows}}}
    (RECORDS.parent / "speedrun.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
