"""Kedge and TRL 1.12 in turn, each in a process and an environment of its own.

    python -m benchmarks.ppo_vs_trl [--cases stories260k pythia-14m pythia-160m] [--rounds 2]
    python -m benchmarks.ppo_vs_trl --beside 1     next to one program that keeps a processor busy
    python -m benchmarks.ppo_vs_trl --cases qwen-0.5b-lora --rounds 1 [--sides kedge trl]

The first update of each process is warm-up.  Seconds are medians; a ratio is of medians, TRL over
Kedge, of wall time and of CPU time (which other programs on the machine disturb less).

With LoRA there are four sides, since PPO's value model may be an adapter or a whole model; what
each trains is in ``TRAINS`` and in the results.  TRL needs about 17 GiB there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.ppo_vs_trl.cases import CASES

ROOT = Path(__file__).parents[2]
PEER = ROOT / "benchmarks" / ".venv-trl"
RESULTS = ROOT / "benchmarks" / "records" / "ppo_vs_trl.json"
UPDATES = {"stories260k": 5, "pythia-14m": 3, "pythia-160m": 2, "qwen-0.5b-lora": 2}
LIKE = {
    "value_adapter": ("kedge", "trl-value-adapter"),
    "value_model": ("kedge-value-model", "trl"),
}
ONE_BASE = "LoRA of rank 16 on all linear layers; the base without adapter is the reference"
TRAINS = {
    "kedge": f"policy: {ONE_BASE}; value: a second adapter on the same base, and a head",
    "trl": f"policy: {ONE_BASE}; value: all weights of a separate model",
    "kedge-value-model": f"policy: {ONE_BASE}; value: all weights of a separate model",
    "trl-value-adapter": f"policy: {ONE_BASE}; value: LoRA and head of a separate model",
}


def peer_python(given: str | None) -> str:
    """The interpreter of an environment with TRL 1.12; made if none is given."""
    if given:
        return given
    python = PEER / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "trl==1.12.0", "transformers==5.23.0", "peft", "rich"], check=True)
    return str(python)


def sides(case: str) -> list[str]:
    """What is compared: two programs, and with LoRA two kinds of value model."""
    return list(TRAINS) if CASES[case].lora else ["kedge", "trl"]


def one(python: str, side: str, case: str, threads: int) -> dict[str, Any]:
    """One process of one side."""
    done = subprocess.run(
        [
            *(python, "-W", "ignore", "-m", "benchmarks.ppo_vs_trl.side"),
            *(side, case, str(UPDATES[case]), str(threads)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            return json.loads(line[len("REPORT ") :])
    raise RuntimeError(f"{side} on {case} failed:\n{done.stderr[-3000:]}")


@contextlib.contextmanager
def busy(programs: int) -> Iterator[None]:
    """Context in which so many other programs keep a processor busy each."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)
    ]
    try:
        yield
    finally:
        for program in spinning:
            program.kill()
            program.wait()


def compare(case: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of all sides and their ratios."""
    out: dict[str, Any] = {"case": case, "batch": CASES[case].batch}
    present = list(dict.fromkeys(r["side"] for r in reports))
    for side in present:
        own, prefix = [r for r in reports if r["side"] == side], side.replace("-", "_")
        for name in ("seconds", "cpu_seconds"):
            out[f"{prefix}_{name}"] = statistics.median(x for r in own for x in r[name][1:])
        out[f"{prefix}_peak_mib"] = statistics.median(r["peak_rss_mib"] for r in own)
        out[f"{prefix}_base_mib"] = statistics.median(r["rss_before_mib"] for r in own)
    pairs = {"": ("kedge", "trl")} | (LIKE if CASES[case].lora else {})
    for label, pair in pairs.items():
        if set(pair) <= set(present):
            end = label and f"_{label}"
            ours, theirs = (side.replace("-", "_") for side in pair)
            for ratio, name in (("ratio", "seconds"), ("cpu_ratio", "cpu_seconds")):
                out[f"{ratio}{end}"] = out[f"{theirs}_{name}"] / out[f"{ours}_{name}"]
            out[f"memory_ratio{end}"] = out[f"{ours}_peak_mib"] / out[f"{theirs}_peak_mib"]
    return out | ({"trains": {side: TRAINS[side] for side in present}} if CASES[case].lora else {})


def processor() -> str:
    """The processor's name and family, as Linux has them."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    named = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in reversed(lines) if ":" in line)
    if "model name" not in named:
        return platform.processor() or platform.machine()
    return f"{named['model name']}, family {named.get('cpu family')}, model {named.get('model')}"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    small = [case for case in CASES if not CASES[case].lora]
    flags.add_argument("--cases", nargs="+", default=small, choices=list(CASES))
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    flags.add_argument("--beside", type=int, default=0, help="other programs that only spin")
    flags.add_argument("--peer", help="python of an environment with trl==1.12.0")
    flags.add_argument("--sides", nargs="+", choices=list(TRAINS), help="default: all of the case")
    flags = flags.parse_args()
    peer = peer_python(flags.peer)
    results = []
    for case in flags.cases:
        reports = []
        for side in flags.rounds * (flags.sides or sides(case)):
            python = peer if side.startswith("trl") else sys.executable
            with busy(flags.beside):
                reports.append(one(python, side, case, flags.threads))
        results.append(compare(case, reports) | {"beside": flags.beside, "raw": reports})
        told = {k: round(v, 3) if isinstance(v, float) else v for k, v in results[-1].items()}
        del told["raw"]
        print(json.dumps(told), flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        results[-1]["machine"] = {"processor": processor(), "threads": flags.threads}
        others = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else []
        new = [(x["case"], x["beside"], x["machine"]) for x in results]
        kept = [x for x in others if (x["case"], x.get("beside", 0), x["machine"]) not in new]
        RESULTS.write_text(json.dumps({"results": kept + results}, indent=1))


if __name__ == "__main__":
    main()
