"""Training of the top 2 of 12 layers against training of all layers: pythia-160m's shape, in turn.

    python -m benchmarks.cached_backbone [--cases long checkpointed short] [--rounds 1]

PPO with a separate value model and a reference, responses of 53 tokens, four epochs, float32, one
thread.  Prompts are random tokens: "long" 4 of 256 to 448, as of summaries of posts; "short" 8 of
32 to 128, the case of ``benchmarks.ppo_vs_trl``; "checkpointed" is "long" with gradient
checkpointing, which is Kedge's default and off in the others.  Each side runs one iteration in a
fresh process.  CPU seconds of an iteration, and of its update (log-probabilities, values, four
epochs); memory is the peak resident set.  The side ``uncached`` trains the same layers with
``cache_trunk=False``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.ppo_vs_trl.__main__ import processor

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cached_backbone.json"
SIDES: dict[str, dict[str, Any]] = {
    "full": {},
    "cached": {"train_layers": 2},
    "uncached": {"train_layers": 2, "cache_trunk": False},
}
LONG = (4, 256, 448)  # rows, and tokens from and to
PROMPTS = {"long": LONG, "checkpointed": LONG, "short": (8, 32, 128)}


def draw(name: str, vocabulary: int) -> list[dict[str, list[int]]]:
    """Random prompts."""
    rows, low, high = PROMPTS[name]
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(low, high + 1, (rows,), generator=generator).tolist()
    draws = [torch.randint(2, vocabulary, (n,), generator=generator) for n in lengths]
    return [{"input_ids": ids.tolist()} for ids in draws]


def one(side: str, name: str) -> dict[str, Any]:
    """Train in this process."""
    from transformers import TrainerCallback

    from benchmarks.ppo_vs_trl.cases import CASES, models, tokenizer
    from benchmarks.ppo_vs_trl.side import common
    from kedge import PPOConfig, PPOTrainer
    from kedge.loop.updater import Updater

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    update: list[float] = []
    iterations: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            iterations.append(time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            iterations.append(time.process_time())

    train_on = Updater.train_on

    def timed(*args: Any, **kwargs: Any) -> dict[str, float]:
        begin = time.process_time()
        metrics = train_on(*args, **kwargs)
        update.append(time.process_time() - begin)
        return metrics

    Updater.train_on = timed  # type: ignore[method-assign]
    case = replace(CASES["pythia-160m"], batch=PROMPTS[name][0])
    options = common(case, 1) | {"gradient_checkpointing": name == "checkpointed"}
    policy, reference, reward, value = models(case)
    del reference  # a copy of the policy, as by default
    PPOTrainer(
        PPOConfig(**options | SIDES[side], disable_tqdm=True, preflight=False),
        tokenizer(case),
        policy,
        None,
        reward,
        draw(name, case.shape["vocab_size"]),
        value,
        callbacks=[Clock()],
    ).train()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(x.split()[1]) for x in status if x.startswith("VmHWM")) / 1024
    return {
        "side": side,
        "case": name,
        "iteration_cpu_seconds": iterations[-1] - iterations[-2],
        "update_cpu_seconds": update[-1],
        "peak_mib": peak,
    }


def run(side: str, name: str) -> dict[str, Any]:
    """Train in a fresh process."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.cached_backbone", "--one", side, name],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
            env=environment,
        )
        for line in done.stdout.splitlines():
            if line.startswith("REPORT "):
                report = json.loads(line.removeprefix("REPORT "))
                print(json.dumps(report), flush=True)
                return report
        errors.seek(0)
        raise RuntimeError(f"{side} failed:\n{errors.read()[-3000:]}")


def ratios(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians over rounds, over those of full training."""
    keys = ("iteration_cpu_seconds", "update_cpu_seconds", "peak_mib")
    medians = {
        side: {key: median(r[key] for r in runs if r["side"] == side) for key in keys}
        for side in {r["side"] for r in runs}
    }
    full = medians.pop("full", None)
    if full is None:
        return {}
    return {s: {key: m[key] / full[key] for key in keys} for s, m in medians.items()}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=1)
    flags.add_argument("--cases", nargs="+", default=["long"], choices=list(PROMPTS))
    flags.add_argument("--sides", nargs="+", default=["full", "cached"], choices=list(SIDES))
    flags.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.one:
        print("REPORT " + json.dumps(one(*given.one)))
        return
    import transformers

    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result["processor"] = processor()
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in given.cases:
        runs = [run(side, name) for _ in range(given.rounds) for side in given.sides]
        result[name] = {"runs": runs, "over full": ratios(runs)}
        print(json.dumps({name: result[name]["over full"]}))
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
