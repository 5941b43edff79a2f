"""Questions that the model answers sometimes, and PPO until it always does.

python examples/chat_model/perfect.py --seed 0     # --bf16 where the processor has it

Keeps questions of ``tasks.py`` that are answered right 20% to 80% of the time (eight samples),
trains on them with PPO, and samples again.  Finished stages are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from reward import names_the_answer
from tasks import questions

HERE = Path(__file__).parent
SAMPLE = "generate --max_new_tokens 32 --temperature 0.7 --num_generations 8 --output"
TRAIN = (
    f"ppo --config {HERE / 'ppo.yaml'} --reward_funcs {HERE / 'reward.py'}:names_the_answer"
    " --reward_weights 1.0 --max_steps 40 --num_generations 2 --temperature 1.0"
    " --learning_rate 1e-4 --lr_scheduler_type linear --kl_coef 0.05 --num_sample_generations 0"
    " --disable_tqdm True --logging_steps 1"
)


def run(command: str, output: Path) -> None:
    """A command of kedge, unless its output is there."""
    if not output.exists():
        subprocess.run([sys.executable, "-m", "kedge", *command.split()], check=True)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a file of JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def judge(file: Path) -> dict[str, list[float]]:
    """Whether each completion of a file is right, by question."""
    found = defaultdict(list)
    for row in map(json.loads, file.read_text().splitlines()):
        right = names_the_answer([row["completion"]], answer=[row["answer"]])[0]
        found[row["prompt"][0]["content"]].append(right)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("runs/chat/model"))
    parser.add_argument("--output_dir", type=Path, default=Path("runs/chat/perfect"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="where the processor has it")
    args = parser.parse_args()
    folder = args.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    every = [
        {"prompt": [{"role": "user", "content": question}], "answer": answer}
        for question, answer in questions()
    ]
    write_rows(folder / "all.jsonl", every)
    before = folder / "before.jsonl"
    run(f"{SAMPLE} {before} {args.model} {folder / 'all.jsonl'}", before)
    shares = {question: sum(right) / len(right) for question, right in judge(before).items()}
    some = [row for row in every if 0.2 <= shares[row["prompt"][0]["content"]] <= 0.8][::2]
    write_rows(folder / "some.jsonl", some)
    model = folder / f"seed-{args.seed}"
    flags = f"--model_name_or_path {args.model} --dataset_name {folder / 'some.jsonl'}"
    flags += f" --seed {args.seed} --output_dir {model} --bf16 {args.bf16}"
    run(f"{TRAIN} {flags}", model / "config.json")
    after = folder / f"after-{args.seed}.jsonl"
    run(f"{SAMPLE} {after} {model} {folder / 'some.jsonl'}", after)
    right = judge(after)
    start = sum(shares[question] for question in right) / len(right)
    end = sum(map(sum, right.values())) / sum(map(len, right.values()))
    print(f"{len(right)} questions, answered right {start:.1%} before, {end:.1%} after")


if __name__ == "__main__":
    main()
