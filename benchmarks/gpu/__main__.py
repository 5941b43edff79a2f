"""PPO, RLOO and GRPO on a GPU, with vLLM and against TRL 1.12 where these are installed.

    python -m benchmarks.gpu [--output results.json] [--runs "kedge ppo pythia-1b" ...]

Random weights, prompts of 32 to 128 tokens, responses of exactly 256, bf16, one process per run.
The first iteration of a run is warm-up; seconds are medians of the others.  The utilization counts
2 operations per weight and token forward and 4 backward, nothing for attention, against the 989
TFLOP/s of an H100 in bf16.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PEAK = 989  # TFLOP/s
RUNS = [
    "kedge ppo qwen2.5-0.5b",
    "trl ppo qwen2.5-0.5b",
    "kedge grpo qwen2.5-0.5b",
    "trl grpo qwen2.5-0.5b",
    "kedge ppo qwen2.5-0.5b --engine vllm",
    "kedge grpo qwen2.5-0.5b --engine vllm",
    "kedge rloo qwen2.5-0.5b",
    "kedge ppo qwen2.5-0.5b --micro 32",
    "kedge grpo qwen2.5-0.5b --batch 512 --micro 64",
    "kedge ppo pythia-1b --micro 8",
    "kedge grpo qwen2.5-1.5b",
    "kedge ppo qwen2.5-1.5b --micro 8 --checkpointing",
]


def measure(run: str, seconds: float) -> dict[str, Any]:
    """The report of one process, or what went wrong."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.side", *run.split()]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"run": run, "error": f"stopped after {seconds:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            return {"run": run} | json.loads(line.removeprefix("REPORT "))
    return {"run": run, "error": done.stderr[-800:]}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "gpu.json")
    flags.add_argument("--runs", nargs="+", default=RUNS, help="what to run, in this order")
    flags.add_argument("--seconds", type=float, default=110, help="most seconds of one run")
    args = flags.parse_args()
    missing = [name for name in ("trl", "vllm") if importlib.util.find_spec(name) is None]
    reports = []
    print("| run | s/iteration | sampling | training | tokens/s | utilization | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    for run in (run for run in args.runs if not any(name in run for name in missing)):
        report = measure(run, args.seconds)
        reports.append(report)
        args.output.write_text(json.dumps(reports, indent=1) + "\n")
        if "error" in report:
            print(f"| {run} | {report['error'].strip().splitlines()[-1]} |", flush=True)
            continue
        phases = report["phases"] or {}
        cells = [
            f"{statistics.median(report['seconds'][1:]):.1f}",
            f"{phases['time/rollout']:.1f}" if phases else "",
            f"{phases['time/update']:.1f}" if phases else "",
            f"{report['tokens_per_second']:.0f}",
            f"{report['tflops'] / PEAK:.1%}",
            f"{report['peak_gib']:.1f}" if report["peak_gib"] else "",
        ]
        print(f"| {run} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
