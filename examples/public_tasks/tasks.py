"""Prompts of tasks that others publish results on, in runs/public.

python examples/public_tasks/tasks.py spell_backward     needs: pip install reasoning-gym
python examples/public_tasks/tasks.py countdown          the same
python examples/public_tasks/tasks.py gsm8k --source train.jsonl test.jsonl

Without ``--source``, the rows of GSM8K come from the hub (openai/gsm8k).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Sizes of the words and numbers: rlhf-book's spell_backward, TinyZero's Countdown-Tasks-3to4.
GENERATED: dict[str, dict[str, Any]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 10},
    "countdown": {"min_numbers": 3, "max_numbers": 4, "min_target": 10, "max_target": 99},
}
GSM8K_FORMAT = " Think step by step, and write the final number after ####."


def generated(name: str, rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """Questions of reasoning-gym, with its system prompt for answers between tags."""
    import reasoning_gym
    from reasoning_gym.utils import SYSTEM_PROMPTS

    system = {"role": "system", "content": SYSTEM_PROMPTS["DeepSeekZero"]}
    for entry in reasoning_gym.create_dataset(name, size=rows, seed=seed, **GENERATED[name]):
        user = {"role": "user", "content": entry["question"]}
        # The entry is JSON, since the columns of a dataset have one type.
        yield {"prompt": [system, user], "entry": json.dumps(entry)}


def gsm8k(file: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Questions of GSM8K, with the solution that the verifier reads the number from."""
    import datasets

    rows = (
        datasets.load_dataset("json", data_files=file, split="train")
        if file
        else datasets.load_dataset("openai/gsm8k", "main", split=split)
    )
    for row in rows:
        text = row["question"] + GSM8K_FORMAT
        yield {"prompt": [{"role": "user", "content": text}], "ground_truth": row["answer"]}


def main() -> None:
    """Write train.jsonl and test.jsonl."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("task", choices=[*GENERATED, "gsm8k"])
    flags.add_argument("--output_dir", default="runs/public", type=Path)
    flags.add_argument("--rows", nargs=2, default=[10_000, 500], type=int, metavar="N")
    flags.add_argument("--source", nargs=2, metavar="FILE", help="train and test rows of GSM8K")
    args = flags.parse_args()
    folder = args.output_dir / args.task
    folder.mkdir(parents=True, exist_ok=True)
    for number, split in enumerate(("train", "test")):
        if args.task == "gsm8k":
            rows = gsm8k(args.source and args.source[number], split)
        else:  # reasoning-gym's seed of a row is that of the dataset plus its index
            rows = generated(args.task, args.rows[number], seed=number * 10**6)
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines))
        print(f"{folder / split}.jsonl: {len(lines)} prompts")


if __name__ == "__main__":
    main()
