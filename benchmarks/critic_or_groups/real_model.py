"""SmolLM2-135M: what the value model does on single responses, and a critic in a calculator.

python -m benchmarks.critic_or_groups.real_model chat
python -m benchmarks.critic_or_groups.real_model calculator

Needs `examples/chat_model/convert.py` and `tasks.py` first; each run is a line of the record.
docs/records/critic-or-groups.md has the rules, which were written before the runs, and the results.
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
CHAT_DATA = """--model_name_or_path runs/chat/model --dataset_name runs/chat/data/train.jsonl
    --reward_funcs kedge.verifiers:ifeval examples/chat_model/reward.py:names_the_answer
    --reward_weights 0.5 0.5 --num_generations 8 --response_length 32 --temperature 0.7
    --missing_eos_penalty 0.5"""
CHAT_PPO = "ppo --config examples/chat_model/ppo.yaml"
COPY = f"{CHAT_PPO} --value_source copy --vf_coef 0.5 --value_learning_rate"
GAME = """kedge.environments.games:Calculator --environment_kwargs {"terms":[2,3]} --max_turns 6"""
PLAYED = f"""--model_name_or_path @/start --environment {GAME} --max_turn_tokens 16
    --response_length 120 --temperature 1.0 --stop_token eos"""
SIZE = """--per_device_train_batch_size 16 --gradient_accumulation_steps 4 --num_ppo_epochs 1
    --train_layers 8 --logging_steps 1 --preflight False
    --lr_scheduler_type constant --save_strategy no
    --num_sample_generations 0 --disable_tqdm True --overwrite_output_dir True"""
SCHEDULE = {
    "chat": "--max_steps 10 --learning_rate 2e-4",
    "calculator": "--max_steps 6 --learning_rate 5e-5",
}
# Commands before the runs of a task; @ is the folder of the runs.
STARTS = {
    "chat": [],
    "calculator": [
        f"expert {GAME} --episodes 200 --first_seed 5000000 --noise 0.1 --output @/episodes.jsonl",
        """sft --model_name_or_path runs/chat/model --dataset_name @/episodes.jsonl
        --assistant_only_loss True --per_device_train_batch_size 8 --num_train_epochs 1
        --learning_rate 5e-5 --lr_scheduler_type cosine --warmup_steps 3 --logging_steps 5
        --save_strategy no --gradient_checkpointing False --disable_tqdm True --output_dir @/start
        --seed 0""",
    ],
}
# {donor} is the value model that "PPO, separate value model" trained on the seed before.
METHODS = {
    "chat": {
        "PPO": CHAT_PPO,
        "PPO, value stays 0": f"{CHAT_PPO} --value_learning_rate 0",
        "PPO, value of the prompt": f"{CHAT_PPO} --credit turn",
        "PPO, separate value model": f"{COPY} 2e-5",
        "PPO, value model of another run": f"{COPY} 0 --value_model_path {{donor}}",
        "RLOO, 4 steps": f"rloo {CHAT_DATA} --kl_coef 0.02 --num_mini_batches 4",
        "GRPO, 4 steps": f"grpo {CHAT_DATA} --beta 0.02 --num_mini_batches 4",
        "RLOO, 1 step": f"rloo {CHAT_DATA} --kl_coef 0.02 --num_mini_batches 1",
        "GRPO, 1 step": f"grpo {CHAT_DATA} --beta 0.02 --num_mini_batches 1",
    },
    "calculator": {
        "PPO": f"""ppo {PLAYED} --kl_coef 0.02 --num_mini_batches 4 --value_learning_rate 3e-4
        --vf_coef 0.01 --lam 1.0""",
        "RLOO": f"rloo {PLAYED} --kl_coef 0.02 --num_mini_batches 4 --num_generations 4",
        "GRPO": f"grpo {PLAYED} --beta 0.02 --num_mini_batches 4 --num_generations 8",
    },
}


def kedge(line: str, folder: Path, flags: str = "") -> None:
    """Run a command of Kedge, at one thread."""
    words = f"{line} {flags}".replace("@", str(folder)).split()
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "kedge.cli.main", *words]
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def learn(task: str, method: str, seed: int, folder: Path, flags: str) -> dict[str, list[float]]:
    """The columns of every iteration of one run, and the CPU seconds of its process."""
    output = folder / method.replace(",", "").replace(" ", "-") / str(seed)
    donor = folder / "PPO-separate-value-model" / str((seed - 1) % 3) / "value_model"
    line = METHODS[task][method].replace("{donor}", str(donor))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    steps = f"{SCHEDULE[task]} --seed {seed} --output_dir {output}"
    kedge(f"{line} {SIZE} {steps}", folder, flags)
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
    flags.add_argument("task", choices=list(METHODS))
    flags.add_argument("--output_dir", type=Path, help="default: runs/critic-TASK")
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument("--methods", nargs="+", help="default: all of the task")
    flags.add_argument("--flags", default="--bf16 True", help="more flags of every command")
    args = flags.parse_args()
    folder = args.output_dir or Path("runs", f"critic-{args.task}")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "start" / "config.json").is_file():
        for line in STARTS[args.task]:
            kedge(line, folder)
    record = RECORDS / f"{args.task}.jsonl"
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    known = {(run["method"], run["seed"]) for run in done}
    for method, seed in product(args.methods or METHODS[args.task], args.seeds):
        if (method, seed) in known:
            continue
        run = {"game": args.task, "method": method, "seed": seed, "flags": args.flags}
        run |= about() | {"rows": learn(args.task, method, seed, folder, args.flags)}
        with record.open("a") as file:
            file.write(json.dumps(run, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
