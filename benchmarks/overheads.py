"""What is not sampling, scoring or training: imports, help, the start of a run, logs.

    python -m benchmarks.overheads [--prompts 1000000] [--updates 6]

Every part runs in a process of its own.  CPU seconds, with wall seconds beside them, since other
programs disturb those more; `import kedge` and the help are the least of three.  The run is PPO on
pythia-14m's shape: from the trainer's constructor (models are loaded) to the first call of the
rollout engine, and the share of an update that its log rows and token rows take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "overheads.json"
COMMANDS = {
    "import kedge": ["-c", "import kedge"],
    "kedge --help": ["-m", "kedge", "--help"],
    "kedge ppo --help": ["-m", "kedge", "ppo", "--help"],
    "kedge report --help": ["-m", "kedge", "report", "--help"],
    "import torch (for comparison)": ["-c", "import torch"],
}
WORDS = [
    "once",
    "upon",
    "a",
    "time",
    "there",
    "was",
    "little",
    "girl",
    "who",
    "loved",
    "the",
    "tree",
]
Seconds = dict[str, float]


class Stopwatch:
    """CPU and wall seconds since it was made."""

    def __init__(self) -> None:
        self._begin = time.process_time(), time.perf_counter()

    def read(self) -> Seconds:
        cpu, wall = self._begin
        return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def command(args: list[str]) -> Seconds:
    """The least of three processes."""
    found = []
    for _ in range(3):
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *args], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.append({"cpu": cpu, "wall": time.perf_counter() - begin})
    return min(found, key=lambda seconds: seconds["cpu"])


def dataset_side(rows: int) -> dict[str, Any]:
    """From a file of ``rows`` prompts of 6 to 16 words to the first batch."""
    from datasets import load_dataset

    from benchmarks.ppo_vs_trl.cases import CASES, tokenizer
    from kedge.data import DatasetPrompts

    words = tokenizer(CASES["stories260k"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        file, rng = Path(folder) / "prompts.jsonl", random.Random(0)
        with file.open("w") as out:
            for _ in range(rows):
                text = " ".join(rng.choices(WORDS, k=rng.randint(6, 16)))
                out.write(json.dumps({"prompt": text}) + "\n")
        watch = Stopwatch()
        data = load_dataset("json", data_files=str(file), split="train", cache_dir=folder)
        prompts = DatasetPrompts(data, words, prompts_per_step=64, seed=0, max_prompt_length=64)
        prompts.batch(0)
        seconds = watch.read()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds | {"rows": rows, "peak_mb": peak / 1e3, "peak_before_mb": before / 1e3}


def run_side(updates: int) -> dict[str, Any]:
    """PPO on pythia-14m's shape with the defaults of logging."""
    from transformers.trainer_callback import CallbackHandler

    from benchmarks.ppo_vs_trl.cases import CASES, models, prompts, tokenizer
    from benchmarks.ppo_vs_trl.side import common
    from kedge import PPOConfig, PPOTrainer
    from kedge.reporting.responses import TokenLog
    from kedge.rollout.embedded.engine import EmbeddedEngine

    spent: dict[str, list[Seconds]] = {"log rows": [], "token rows": []}
    samples: list[Seconds] = []

    def timed(owner: Any, name: str, into: list[Seconds]) -> None:
        usual: Callable[..., Any] = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            begin = Stopwatch()
            result = usual(*args, **kwargs)
            into.append(begin.read())
            return result

        setattr(owner, name, method)

    case = CASES["pythia-14m"]
    policy, reference, reward, value = models(case)
    rows = [{"input_ids": ids} for ids in prompts(case, case.batch * updates)]
    words = tokenizer(case)
    timed(CallbackHandler, "on_log", spent["log rows"])
    for name in ("hold", "write"):
        timed(TokenLog, name, spent["token rows"])
    usual = EmbeddedEngine.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        samples.append(watch.read())
        return usual(*args, **kwargs)

    EmbeddedEngine.generate = generate  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        changed = {"output_dir": folder, "logging_steps": 10, "disable_tqdm": True}
        changed |= {"preflight": True}
        watch = Stopwatch()
        trainer = PPOTrainer(
            PPOConfig(**common(case, updates) | changed), words, policy, reference, reward, rows,
            value,
        )  # fmt: skip
        trainer.train()
        whole = watch.read()
    update = (whole["cpu"] - samples[-updates]["cpu"]) / updates
    share = {name: sum(x["cpu"] for x in parts) / updates / update for name, parts in spent.items()}
    return {
        "to_first_sample": samples[0],
        "cpu_seconds_update": update,
        "updates": updates,
        "share_of_updates": share,
    }


def side(name: str, number: int) -> dict[str, Any]:
    """One part in a process of its own."""
    args = [sys.executable, "-W", "ignore", "-m", "benchmarks.overheads", "--side", name]
    done = subprocess.run(
        [*args, str(number)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            found: dict[str, Any] = json.loads(line[len("REPORT ") :])
            return found
    raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.side:
        name, number = flags.side
        found = (dataset_side if name == "dataset" else run_side)(int(number))
        print("REPORT " + json.dumps(found))
        return
    import torch
    import transformers

    results: dict[str, Any] = {
        "about": {
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "machine": platform.processor() or platform.machine(),
            "threads": os.environ.get("OMP_NUM_THREADS", "default"),
            "load": os.getloadavg(),
        },
        "commands": {name: command(args) for name, args in COMMANDS.items()},
    }
    results["run"] = side("run", flags.updates)
    results["dataset"] = side("dataset", flags.prompts)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
