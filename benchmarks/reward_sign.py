"""The sign of the mean reward, while PPO's value head knows nothing.

python -m benchmarks.reward_sign runs/demo     after `make demo`, whose supervised model it trains

The reward takes off 0.1 per word, so that the best answer is the shortest.  A value of 0 leaves the
last tokens of an answer with the whole reward: a negative one punishes ending, until the value is
learned.  docs/questions.md has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import load_dataset

from benchmarks.critic_or_groups.__main__ import about
from kedge import PPOConfig, PPOTrainer

RECORD = Path(__file__).parent / "records" / "reward_sign.json"
VARIANTS: dict[str, tuple[float, dict[str, Any]]] = {  # added to the reward, options
    "as it is": (0.0, {}),
    "value_warmup_steps=3": (0.0, {"value_warmup_steps": 3}),
    "lam=1": (0.0, {"lam": 1.0}),
    "2.4 added to every reward": (2.4, {}),
}
OPTIONS = {
    **{"total_episodes": 1280, "per_device_train_batch_size": 64, "response_length": 48},
    **{"temperature": 0.7, "stop_token": "eos", "learning_rate": 4e-4, "kl_coef": 0.05},
    **{"logging_steps": 1, "num_sample_generations": 0, "save_strategy": "no", "use_cpu": True},
    **{"gradient_checkpointing": False, "disable_tqdm": True},
}


def learn(demo: Path, name: str, seed: int) -> dict[str, list[float]]:
    """Words of reward taken off and tokens of every iteration."""
    added, options = VARIANTS[name]
    rows = load_dataset("json", data_files=str(demo / "data" / "prompts.jsonl"), split="train")

    def brief(completions: list[str], **_: Any) -> list[float]:
        return [added - 0.1 * len(text.split()) for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(output_dir=folder, seed=seed, **OPTIONS | options)
        PPOTrainer(
            args=args,
            model=str(demo / "sft"),
            reward_funcs=brief,
            train_dataset=rows.select_columns(["prompt"]),
        ).train()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    logs = [log for log in map(json.loads, lines) if "objective/scores" in log]
    return {
        "score": [round(log["objective/scores"] - added, 3) for log in logs],
        "tokens": [round(log["completions/mean_length"], 1) for log in logs],
    }


def main() -> None:
    """Run every variant, and write the record."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    flags.add_argument("demo", type=Path, help="folder of `make demo`")
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = flags.parse_args()
    runs = {name: [learn(args.demo, name, s) for s in args.seeds] for name in VARIANTS}
    shown = (lambda x: x[0], lambda x: max(x[:10]), lambda x: x[9], lambda x: x[-1])
    rows = []
    for name, by_seed in runs.items():
        means = [fmean(show(run["tokens"]) for run in by_seed) for show in shown]
        reward = fmean(run["score"][-1] for run in by_seed)
        rows.append([name, *(f"{x:.1f}" for x in means), f"{reward:.2f}"])
    columns = ["", "tokens per response, 1st iteration", "most in the first 10", "10th", "20th"]
    columns += ["reward, 20th"]
    record = {
        "about": about() | {"command": "python -m benchmarks.reward_sign runs/demo"},
        "tables": {"tokens": {"columns": columns, "rows": rows}},
        "runs": runs,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
