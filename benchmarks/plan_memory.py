"""Peak memory of each phase of ``kedge ppo`` against what ``kedge plan`` predicts, on a CPU.

    python -m benchmarks.plan_memory [--cases pythia-14m pythia-160m qwen2.5-0.5b-lora]

Random weights in the shapes of the models.  Each run is a fresh process of the command line; before
each phase the peak resident set of the process is reset (Linux, /proc/self/clear_refs).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import lora_memory
from benchmarks.lora_memory import peak_mib
from benchmarks.ppo_vs_trl.cases import LAYERS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan_memory.json"
CASES: dict[str, list[str]] = {
    "pythia-14m": ["--per_device_train_batch_size", "16", "--reward_model_path", "REWARD"],
    "pythia-160m": ["--per_device_train_batch_size", "8", "--reward_model_path", "REWARD"],
    "qwen2.5-0.5b-lora": [
        *("--use_peft", "--lora_target_modules", *LAYERS, "--value_adapter", "True"),
        *("--reward_adapter", "REWARD", "--per_device_train_batch_size", "8"),
    ],
}
LENGTHS = {"pythia-14m": 128, "pythia-160m": 128, "qwen2.5-0.5b-lora": 64}


def write(case: str, folder: Path) -> None:
    """Models, tokenizer and prompts of a case."""
    if case == "qwen2.5-0.5b-lora":
        from transformers import Qwen2ForCausalLM

        lora_memory.write_reward_adapter(str(folder / "reward"))
        Qwen2ForCausalLM(lora_memory.config()).save_pretrained(folder / "policy")
        tokenizer = lora_memory.tokenizer()
    else:
        from benchmarks.ppo_vs_trl import cases

        policy, _, reward, _ = cases.models(cases.CASES[case])
        policy.save_pretrained(folder / "policy")
        reward.save_pretrained(folder / "reward")
        tokenizer = cases.tokenizer(cases.CASES[case])
        tokenizer.save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "policy")
    rows = [{"input_ids": [2 + i + j for j in range(LENGTHS[case])]} for i in range(32)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def flags(case: str, folder: Path) -> list[str]:
    """The flags of the run, and of its plan."""
    own = [str(folder / "reward") if x == "REWARD" else x for x in CASES[case]]
    return [
        *("--model_name_or_path", str(folder / "policy"), *own),
        *("--dataset_name", str(folder / "prompts.jsonl"), "--output_dir", str(folder / "run")),
        *("--max_steps", "2", "--num_ppo_epochs", "1", "--response_length", "64"),
        *("--stop_token", "none", "--use_cpu", "--save_strategy", "no"),
        *("--num_sample_generations", "0", "--log_token_rows", "0"),
    ]


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(case: str, folder: Path) -> dict[str, float]:
    """Train in this process: the peak of each phase in MiB, the largest of all calls."""
    from kedge.cli.main import main as run
    from kedge.learner.learner import HFLearner
    from kedge.rewards import RewardModel
    from kedge.rollout.embedded.engine import EmbeddedEngine

    peaks: dict[str, float] = {}

    def watched(kind: type, method: str, phase: str) -> None:
        original: Callable[..., Any] = getattr(kind, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            peaks[between] = max(peaks.get(between, 0.0), peak_mib())
            reset_peak()
            try:
                return original(*args, **kwargs)
            finally:
                peaks[phase] = max(peaks.get(phase, 0.0), peak_mib())
                reset_peak()

        between = "loading and other"
        setattr(kind, method, call)

    watched(EmbeddedEngine, "generate", "sampling")
    watched(RewardModel, "score", "scoring")
    watched(HFLearner, "compute_logprobs", "log-probabilities")
    watched(HFLearner, "optimizer_step", "training")
    assert run(["ppo", *flags(case, folder)]) == 0
    return peaks


def predict(case: str, folder: Path) -> dict[str, float]:
    """The plan's prediction for each phase, in MiB."""
    from kedge.cli.arguments import parse
    from kedge.ext.plan.command import peaks, plan, process_bytes

    options = parse(flags(case, folder), prog="kedge ppo")
    *_, models = plan(options)
    phases = peaks(models, options.config, process=process_bytes())
    return {n: size / 2**20 for n, size in phases.items()}


def child(action: str, case: str, folder: Path) -> Any:
    """Run an action in a fresh process; its result."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.plan_memory", action, case, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    if done.returncode:
        raise RuntimeError(f"{action} {case} failed:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ("write", "measure", "predict"):
        action, case, folder = sys.argv[1:]
        with contextlib.redirect_stdout(io.StringIO()):
            result = globals()[action](case, Path(folder))
        print(json.dumps(result))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    results = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
    for case in parser.parse_args().cases:
        with tempfile.TemporaryDirectory() as folder:
            child("write", case, Path(folder))
            measured = child("measure", case, Path(folder))
            predicted = child("predict", case, Path(folder))
        off = {phase: predicted[phase] / measured[phase] - 1 for phase in predicted}
        results[case] = {"measured_mib": measured, "predicted_mib": predicted, "off": off}
        print(case, json.dumps(results[case]), flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
    RESULTS.write_text(json.dumps({"machine": machine, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
