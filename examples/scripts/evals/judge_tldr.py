"""Win rate of a model's summaries against the references, by a judge.

    python examples/scripts/evals/judge_tldr.py --model_name_or_path MODEL --engine vllm \
        --judge_url http://127.0.0.1:8000/v1 --judge_model NAME --num_examples 1000

The prompts have columns prompt and completion (the reference).  Summaries, judgments, the table
and cached replies are in --output_dir, so an interrupted run pays for nothing twice.
"""

import argparse
import json
import sys
from pathlib import Path

from kedge.cli import generate
from kedge.cli.main import run_command
from kedge.ext.judge import command as judge


def main(argv: list[str]) -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--model_name_or_path", required=True)
    flags.add_argument("--dataset_name", default="trl-lib/tldr")
    flags.add_argument("--dataset_split", default="validation")
    flags.add_argument("--num_examples", default="1000")
    flags.add_argument("--max_new_tokens", default="200")
    flags.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    flags.add_argument("--judge_url", default="https://api.openai.com/v1")
    flags.add_argument("--judge_model", default="gpt-4o-mini")
    flags.add_argument("--output_dir", default="judge_tldr")
    args, more = flags.parse_known_args(argv)
    output = str(Path(args.output_dir) / "completions.jsonl")
    generate.main(
        [
            *(args.model_name_or_path, args.dataset_name, "--split", args.dataset_split),
            *("--limit", args.num_examples, "--max_new_tokens", args.max_new_tokens),
            *("--engine", args.engine, "--output", output),
        ]
    )
    judge.main(
        [
            *(output, "@reference", "--endpoint", args.judge_url, "--model", args.judge_model),
            *("--output_dir", args.output_dir, *more),
        ]
    )
    summary = json.loads((Path(args.output_dir) / "summary.json").read_text(encoding="utf-8"))
    print(f"Model win rate: {summary['win_rate']:.2%}")


if __name__ == "__main__":
    if code := run_command(main, sys.argv[1:], name="judge_tldr.py"):
        sys.exit(code)
