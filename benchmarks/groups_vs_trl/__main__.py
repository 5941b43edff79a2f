"""RLOO and GRPO of Kedge and of TRL 1.16 in turn, each in a process of its own.

    python -m benchmarks.groups_vs_trl [--cases stories260k pythia-14m] [--rounds 2]

Whole updates: 4 responses to each prompt, scored by a reward model, one pass or four over them, KL
to a reference.  The same environment, models, prompts and settings; the first update is warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "records" / "groups_vs_trl.json"
UPDATES = {"stories260k": 5, "pythia-14m": 3}


def one(side: str, kind: str, case: str, passes: int, threads: int) -> dict[str, Any]:
    """One process of one side."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.groups_vs_trl.side"]
    done = subprocess.run(
        [*command, side, kind, case, str(UPDATES[case]), str(passes), str(threads)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            return json.loads(line.removeprefix("REPORT "))
    raise RuntimeError(
        f"{side} {kind} on {case} with {passes} passes failed:\n{done.stderr[-3000:]}"
    )


def compare(kind: str, case: str, passes: int, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of both sides and their ratios, TRL over Kedge."""
    out: dict[str, Any] = {"algorithm": kind, "case": case, "passes": passes}
    for side in ("kedge", "trl"):
        mine = [r for r in reports if r["side"] == side]
        for name in ("seconds", "cpu_seconds"):
            out[f"{side}_{name}"] = statistics.median(x for r in mine for x in r[name][1:])
        out[f"{side}_peak_mib"] = statistics.median(r["peak_rss_mib"] for r in mine)
    for name in ("seconds", "cpu_seconds"):
        out[f"ratio_{name}"] = out[f"trl_{name}"] / out[f"kedge_{name}"]
    return out


def main() -> None:
    import transformers
    import trl

    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--cases", nargs="+", default=list(UPDATES), choices=list(UPDATES))
    flags.add_argument("--algorithms", nargs="+", default=["rloo", "grpo"])
    flags.add_argument("--passes", type=int, nargs="+", default=[4, 1])
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    chosen = flags.parse_args()
    results = []
    kinds = itertools.product(chosen.cases, chosen.algorithms, chosen.passes)
    for case, kind, passes in kinds:
        reports = [
            one(side, kind, case, passes, chosen.threads)
            for _ in range(chosen.rounds)
            for side in ("kedge", "trl")
        ]
        results.append(compare(kind, case, passes, reports) | {"raw": reports})
        told = {k: v for k, v in results[-1].items() if k != "raw"}
        print(json.dumps(told), flush=True)
        versions = {"trl": trl.__version__, "transformers": transformers.__version__}
        about = {"threads": chosen.threads, "versions": versions}
        RESULTS.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
