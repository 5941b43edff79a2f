"""What a token costs in responses of 64 to 4,096 tokens, and TRL's PPO at 1,024.

    python -m benchmarks.long_responses [--trl-python /path/to/python] [--rounds 3]
        [--lengths 64 256 1024 4096]

One update of PPO (one pass) on pythia-14m's shape, two rows with prompts of 32 tokens, each length
in a process of its own, on one thread; the second update counts, of 4,096 tokens the first.  CPU
seconds of sampling, of log-probabilities and values, and of training; the peak is of the process,
less what it held before the first update.  ``attention`` is the share of attention in the
operations of a stage's forward pass.  Against TRL both sides run in turn, and medians of the rounds
are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.ppo_vs_trl.__main__ import processor
from benchmarks.ppo_vs_trl.cases import CASES, Case, models, tokenizer
from benchmarks.ppo_vs_trl.side import common

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "records" / "long_responses.json"
ROWS, PROMPT, AGAINST = 2, 32, 1024
STAGES = {"sampling": "generate", "logprobs": "compute_logprobs", "training": "optimizer_step"}


def case(length: int) -> Case:
    """Pythia-14m's shape with enough positions."""
    shape = dict(CASES["pythia-14m"].shape or {})
    return Case("long", ROWS, shape | {"max_position_embeddings": max(512, length + PROMPT)})


class Clock(TrainerCallback):
    """CPU seconds at the start and after each update, and memory at the start."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.before = 0

    def _note(self) -> None:
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._note()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._note()


def stage_seconds() -> dict[str, list[float]]:
    """CPU seconds of every call of a stage of Kedge, filled while it runs."""
    from kedge.learner.learner import HFLearner
    from kedge.rollout.embedded.engine import EmbeddedEngine

    spent: dict[str, list[float]] = defaultdict(list)
    for stage, name in STAGES.items():
        owner: Any = EmbeddedEngine if name == "generate" else HFLearner
        usual = getattr(owner, name)

        def timed(*args: Any, usual: Any = usual, stage: str = stage, **kwargs: Any) -> Any:
            begin = time.process_time()
            result = usual(*args, **kwargs)
            spent[stage].append(time.process_time() - begin)
            return result

        setattr(owner, name, timed)
    return spent


def side(name: str, length: int) -> dict[str, Any]:
    """Train with one library."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    updates = 2 if length <= AGAINST else 1
    shape, clock = case(length), Clock()
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 50_000, (ROWS * updates, PROMPT), generator=rng).tolist()
    rows = [{"input_ids": x} for x in ids]
    about = common(shape, updates) | {"response_length": length, "num_ppo_epochs": 1}
    about |= {"output_dir": tempfile.mkdtemp()}
    policy, reference, reward, value = models(shape)
    spent: dict[str, list[float]] = {}
    if name == "kedge":
        from kedge import PPOConfig, PPOTrainer

        spent = stage_seconds()
        config = PPOConfig(**about, disable_tqdm=True, preflight=False, log_token_rows=0)
        PPOTrainer(
            config, tokenizer(shape), policy, reference, reward, rows, value, callbacks=[clock]
        ).train()
    else:
        from datasets import Dataset
        from trl.experimental.ppo import PPOConfig as TRLConfig
        from trl.experimental.ppo import PPOTrainer as TRLTrainer

        data = Dataset.from_list(rows)
        TRLTrainer(
            args=TRLConfig(**about),
            processing_class=tokenizer(shape),
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=value,
            train_dataset=data,
            eval_dataset=data,
            callbacks=[clock],
        ).train()
    tokens = ROWS * length
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - clock.before
    hidden, layers = 128, 6
    attention, rest = 4 * layers * hidden * length / 2, 2 * 12 * layers * hidden**2
    return {
        "side": name,
        "length": length,
        "cpu_seconds": clock.cpu[-1] - clock.cpu[-2],
        "wall_seconds": clock.wall[-1] - clock.wall[-2],
        "peak_mib": peak / 1024,
        "ms_per_token": {stage: 1e3 * x[-1] / tokens for stage, x in spent.items()},
        "peak_kib_per_token": peak / tokens,
        "attention": attention / (attention + rest + 2 * hidden * 50_304),
    }


def one(name: str, length: int, python: str) -> dict[str, Any]:
    """One process."""
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "benchmarks.long_responses", "--side", name, str(length)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            report: dict[str, Any] = json.loads(line[len("REPORT ") :])
            print(line, flush=True)
            return report
    raise RuntimeError(f"{name} at {length} failed:\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument("--trl-python", help="of an environment with TRL; none: Kedge alone")
    parser.add_argument("--rounds", type=int, default=3, help="of both sides, with TRL")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.side:
        print("REPORT " + json.dumps(side(flags.side[0], int(flags.side[1]))))
        return
    import transformers

    found = [one("kedge", length, sys.executable) for length in flags.lengths]
    results: dict[str, Any] = {
        "about": {
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "machine": processor(),
            "load": os.getloadavg(),
        },
        "kedge": found,
    }
    if flags.trl_python:
        sides = {"kedge": sys.executable, "trl": flags.trl_python}
        rounds = [
            {name: one(name, AGAINST, python) for name, python in sides.items()}
            for _ in range(flags.rounds)
        ]
        results["rounds"] = rounds
        results["against_trl"] = {
            key: median(x["trl"][key] for x in rounds) / median(x["kedge"][key] for x in rounds)
            for key in ("cpu_seconds", "wall_seconds", "peak_mib")
        }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results.get("against_trl")))


if __name__ == "__main__":
    main()
