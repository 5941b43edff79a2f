"""Training on k responses to each prompt, with each prompt computed once and with every row alone.

    python -m benchmarks.shared_prompts [--rounds 2] [--algorithms rloo grpo]

A GPT-NeoX of pythia-14m's shape, 16 rows, random prompts of 64 or 448 tokens, k responses of 64
tokens to each, a reference, float32, one thread.  CPU seconds of an update (log-probabilities of
policy and reference, one pass of training; the fastest of three) and of its two parts, and the peak
resident set of the process.  Both sides in turn, each in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cached_backbone import ROOT, processor

RESULTS = ROOT / "benchmarks" / "results" / "shared_prompts.json"
ROWS, RESPONSE, UPDATES = 16, 64, 3
PARTS = {"logprobs": "compute_logprobs", "training": "optimizer_step"}


def one(side: str, algorithm: str, prompt: int, k: int) -> dict[str, Any]:
    """Train in this process."""
    import kedge
    from benchmarks.ppo_vs_trl.cases import CASES, models, tokenizer
    from kedge.learner.learner import HFLearner
    from kedge.loop.updater import Updater
    from kedge.models import packing

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if side == "alone":
        packing._SHARED = 2**62
    spent: dict[str, list[float]] = {}
    for owner, stage, name in [
        (Updater, "update", "train_on"),
        *((HFLearner, stage, name) for stage, name in PARTS.items()),
    ]:
        usual = getattr(owner, name)

        def timed(*args: Any, usual: Any = usual, stage: str = stage, **kwargs: Any) -> Any:
            begin = time.process_time()
            result = usual(*args, **kwargs)
            spent.setdefault(stage, []).append(time.process_time() - begin)
            return result

        setattr(owner, name, timed)
    case = CASES["pythia-14m"]
    policy, *_ = models(case)
    generator = torch.Generator().manual_seed(1)
    shape = (ROWS // k * UPDATES, prompt)
    prompts = torch.randint(2, 50_000, shape, generator=generator).tolist()
    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": ROWS,
        "max_steps": UPDATES,
        "num_generations": k,
        "response_length": RESPONSE,
        "stop_token": None,
        ("beta" if algorithm == "grpo" else "kl_coef"): 0.05,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "num_sample_generations": 0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "preflight": False,
    }
    trainer: Any = getattr(kedge, f"{algorithm.upper()}Trainer")
    trainer(
        args=getattr(kedge, f"{algorithm.upper()}Config")(**options),
        model=policy,
        reward_funcs=lambda completion_ids, **_: [float(ids[0] % 7) for ids in completion_ids],
        train_dataset=[{"input_ids": ids} for ids in prompts],
        processing_class=tokenizer(case),
    ).train()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(x.split()[1]) for x in status if x.startswith("VmHWM")) / 1024
    return {"side": side, **{stage: min(x) for stage, x in spent.items()}, "peak_mib": peak}


def run(side: str, *what: object) -> dict[str, Any]:
    """Train in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.shared_prompts", "--one", side, *map(str, what)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
            return report
    raise RuntimeError(f"{side} failed:\n{done.stderr[-3000:]}")


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--algorithms", nargs="+", default=["rloo"], choices=["rloo", "grpo"])
    flags.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    chosen = flags.parse_args()
    if chosen.one:
        side, algorithm, prompt, k = chosen.one
        print("REPORT " + json.dumps(one(side, algorithm, int(prompt), int(k))))
        return
    cases = []
    for algorithm, prompt, k in itertools.product(chosen.algorithms, (448, 64), (4, 8)):
        what = (algorithm, prompt, k)
        runs = [run(side, *what) for _ in range(chosen.rounds) for side in ("shared", "alone")]
        keys = [*PARTS, "update", "peak_mib"]
        of = {
            side: {key: median(r[key] for r in runs if r["side"] == side) for key in keys}
            for side in ("shared", "alone")
        }
        ratios = {key: of["alone"][key] / of["shared"][key] for key in keys}
        case = {"algorithm": algorithm, "prompt": prompt, "k": k, "alone over shared": ratios}
        print(json.dumps(case | of), flush=True)
        cases.append(case | of | {"runs": runs})
    about = {"torch": torch.__version__, "processor": processor()}
    RESULTS.write_text(json.dumps({"about": about, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
