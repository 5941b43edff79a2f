"""Kedge and TRL 0.11.4 in turn, each in a process and an environment of its own.

    python -m benchmarks.classic_vs_trl [--cases stories260k pythia-14m] [--rounds 3]

The first round of each process is warm-up.  Seconds are minima over the rest, which other programs
on the machine disturb least; a ratio is TRL over Kedge.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.ppo_vs_trl.cases import CASES

ROOT = Path(__file__).parents[2]
PEER = ROOT / "benchmarks" / ".venv-trl011"
RESULTS = ROOT / "benchmarks" / "records" / "classic_vs_trl.json"
UPDATES = {"stories260k": 5, "pythia-14m": 3, "pythia-160m": 2}
NAMES = ("generate", "step", "both", "cpu_generate", "cpu_step", "cpu_both")


def peer_python(given: str | None) -> str:
    """The interpreter of an environment with TRL 0.11.4; made if none is given."""
    if given:
        return given
    python = PEER / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        pins = ["trl==0.11.4", "transformers==4.49.0", "datasets<3.2", "pyarrow<18", "numpy<2"]
        subprocess.run([*pip, *pins, "rich"], check=True)
    return str(python)


def one(python: str, side: str, case: str, threads: int) -> dict[str, Any]:
    """One process of one side."""
    done = subprocess.run(
        [
            *(python, "-W", "ignore", "-m", "benchmarks.classic_vs_trl.side"),
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
    """The least seconds of both sides, per thousand sampled tokens too, and their ratios."""
    out: dict[str, Any] = {"case": case, "batch": CASES[case].batch}
    for side in ("kedge", "trl"):
        warm = [r for report in reports if report["side"] == side for r in report["rounds"][1:]]
        for name in NAMES:
            out[f"{side}_{name}"] = min(r[name] for r in warm)
            out[f"{side}_{name}_per_1k"] = min(1000 * r[name] / r["tokens"] for r in warm)
        out[f"{side}_peak_mib"] = min(r["peak_rss_mib"] for r in reports if r["side"] == side)
    for name in NAMES:
        out[f"ratio_{name}"] = out[f"trl_{name}_per_1k"] / out[f"kedge_{name}_per_1k"]
    return out


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    flags.add_argument("--peer", help="python of an environment with trl==0.11.4")
    flags = flags.parse_args()
    peer = peer_python(flags.peer)
    results = []
    for case in flags.cases:
        reports = []
        for _ in range(flags.rounds):
            reports.append(one(sys.executable, "kedge", case, flags.threads))
            reports.append(one(peer, "trl", case, flags.threads))
        results.append(compare(case, reports) | {"load": os.getloadavg()[0], "raw": reports})
        told = {k: round(v, 3) for k, v in results[-1].items() if k.startswith("ratio")}
        print(case, json.dumps(told), flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        machine = {
            "processor": platform.processor() or platform.machine(),
            "threads": flags.threads,
        }
        RESULTS.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
