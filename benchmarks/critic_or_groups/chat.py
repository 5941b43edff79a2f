"""What the value model does on single responses: every method on the chat task.

python -m benchmarks.critic_or_groups.chat --output_dir runs/critic-chat

Needs `examples/chat_model/convert.py` and `tasks.py` first; each run is a line of the record.
docs/records/critic-or-groups.md has the rule, which was written before the runs, and the result.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.critic_or_groups.__main__ import COLUMNS, RECORDS, about

ROOT = Path(__file__).parents[2]
RECORD = RECORDS / "chat.jsonl"
DATA = """--model_name_or_path runs/chat/model --dataset_name runs/chat/data/train.jsonl
    --reward_funcs kedge.verifiers:ifeval examples/chat_model/reward.py:names_the_answer
    --reward_weights 0.5 0.5 --num_generations 8 --response_length 32 --temperature 0.7
    --missing_eos_penalty 0.5 --lr_scheduler_type constant --save_strategy no"""
SIZE = """--per_device_train_batch_size 16 --gradient_accumulation_steps 4 --num_ppo_epochs 1
    --train_layers 8 --learning_rate 2e-4 --max_steps 10 --logging_steps 1 --preflight False
    --num_sample_generations 0 --disable_tqdm True --overwrite_output_dir True"""
PPO = "ppo --config examples/chat_model/ppo.yaml"
COPY = f"{PPO} --value_source copy --vf_coef 0.5 --value_learning_rate"
# {donor} is the value model that "PPO, separate value model" trained on the seed before.
METHODS = {
    "PPO": PPO,
    "PPO, value stays 0": f"{PPO} --value_learning_rate 0",
    "PPO, value of the prompt": f"{PPO} --credit turn",
    "PPO, separate value model": f"{COPY} 2e-5",
    "PPO, value model of another run": f"{COPY} 0 --value_model_path {{donor}}",
    "RLOO, 4 steps": f"rloo {DATA} --kl_coef 0.02 --num_mini_batches 4",
    "GRPO, 4 steps": f"grpo {DATA} --beta 0.02 --num_mini_batches 4",
    "RLOO, 1 step": f"rloo {DATA} --kl_coef 0.02 --num_mini_batches 1",
    "GRPO, 1 step": f"grpo {DATA} --beta 0.02 --num_mini_batches 1",
}


def learn(method: str, seed: int, folder: Path, flags: str) -> dict[str, list[float]]:
    """The columns of every iteration of one run, and the CPU seconds of its process."""
    output = folder / method.replace(",", "").replace(" ", "-") / str(seed)
    donor = folder / "PPO-separate-value-model" / str((seed - 1) % 3) / "value_model"
    words = f"{METHODS[method].format(donor=donor)} {SIZE} --seed {seed} {flags}".split()
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "kedge.cli.main", *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "--output_dir", str(output)], cwd=ROOT, env=env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    logs = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rows: dict[str, Any] = {
        name: [float(f"{log[key]:.4g}") for log in logs if key in log]
        for name, key in COLUMNS.items()
    }
    (output / "model.safetensors").unlink()
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return rows | {"cpu": [round(cpu, 1)]}


def main() -> None:
    """Run what is missing."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    flags.add_argument("--output_dir", default="runs/critic-chat", type=Path)
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    flags.add_argument("--flags", default="--bf16 True", help="more flags of every command")
    args = flags.parse_args()
    done = [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []
    known = {(run["method"], run["seed"]) for run in done}
    for method, seed in product(args.methods, args.seeds):
        if (method, seed) in known:
            continue
        run = {"game": "chat", "method": method, "seed": seed, "flags": args.flags}
        run |= about() | {"rows": learn(method, seed, args.output_dir, args.flags)}
        with RECORD.open("a") as file:
            file.write(json.dumps(run, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
