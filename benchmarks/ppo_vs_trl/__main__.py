"""Kedge and TRL 1.12 in turn, each in a process and an environment of its own.

    python -m benchmarks.ppo_vs_trl [--cases stories260k pythia-14m pythia-160m] [--rounds 2]

The first update of each process is warm-up.  Seconds are medians; a ratio is of medians, TRL over
Kedge, of wall time and of CPU time (which other programs on the machine disturb less).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.ppo_vs_trl.cases import CASES

ROOT = Path(__file__).parents[2]
PEER = ROOT / "benchmarks" / ".venv-trl"
RESULTS = ROOT / "benchmarks" / "results" / "ppo_vs_trl.json"
UPDATES = {"stories260k": 5, "pythia-14m": 3, "pythia-160m": 2}


def peer_python(given: str | None) -> str:
    """The interpreter of an environment with TRL 1.12; made if none is given."""
    if given:
        return given
    python = PEER / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "trl==1.12.0", "transformers==5.23.0", "rich"], check=True)
    return str(python)


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


def compare(case: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of both sides and their ratios."""
    out: dict[str, Any] = {"case": case, "batch": CASES[case].batch}
    for side in ("kedge", "trl"):
        mine = [r for r in reports if r["side"] == side]
        for name in ("seconds", "cpu_seconds"):
            out[f"{side}_{name}"] = statistics.median(x for r in mine for x in r[name][1:])
        out[f"{side}_peak_mib"] = statistics.median(r["peak_rss_mib"] for r in mine)
        out[f"{side}_base_mib"] = statistics.median(r["rss_before_mib"] for r in mine)
    out["ratio"] = out["trl_seconds"] / out["kedge_seconds"]
    out["cpu_ratio"] = out["trl_cpu_seconds"] / out["kedge_cpu_seconds"]
    out["memory_ratio"] = out["kedge_peak_mib"] / out["trl_peak_mib"]
    return out


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
    flags.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    flags.add_argument("--peer", help="python of an environment with trl==1.12.0")
    flags = flags.parse_args()
    peer = peer_python(flags.peer)
    results = []
    for case in flags.cases:
        reports = []
        for _ in range(flags.rounds):
            reports.append(one(sys.executable, "kedge", case, flags.threads))
            reports.append(one(peer, "trl", case, flags.threads))
        results.append(compare(case, reports) | {"raw": reports})
        told = {k: round(v, 3) if isinstance(v, float) else v for k, v in results[-1].items()}
        del told["raw"]
        print(json.dumps(told), flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        results[-1]["machine"] = {"processor": processor(), "threads": flags.threads}
        others = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else []
        kept = [x for x in others if x["case"] not in {x["case"] for x in results}]
        RESULTS.write_text(json.dumps({"results": kept + results}, indent=1))


if __name__ == "__main__":
    main()
