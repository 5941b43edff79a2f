"""Flags of small runs from the command line, and what they logged."""

import json

SMALL = [
    *("--per_device_train_batch_size", "4", "--num_ppo_epochs", "1", "--response_length", "5"),
    *("--logging_steps", "1", "--num_sample_generations", "0", "--disable_tqdm"),
    "--dummy_reward",
]


def flags(folders, out, *more):
    return [
        *("--model_name_or_path", str(folders / "policy")),
        *("--dataset_name", str(folders / "data"), "--output_dir", str(out)),
        *SMALL,
        *more,
    ]


def logged(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "objective/scores" in row]
