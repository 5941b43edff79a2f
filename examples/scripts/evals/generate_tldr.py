"""Generate summaries; optionally judge them (response1) against references (response0).

    python examples/scripts/evals/generate_tldr.py --model_name_or_path MODEL \
        --output_path evals/ppo_tldr.csv --n 1000 \
        [--dataset_name PROMPTS] [--judge_url http://127.0.0.1:8000/v1 --judge_model NAME]

PROMPTS has columns prompt and completion (the reference).  The judge is OpenAI's if OPENAI_API_KEY
is set and no other is given.  Without a judge the script only generates.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from kedge.cli.data import Splits
from kedge.cli.generate import generate_completions, write
from kedge.cli.main import run_command
from kedge.judges import Endpoint, match


def main(argv: list[str]) -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--model_name_or_path", required=True)
    flags.add_argument("--output_path", default="tldr.csv")
    flags.add_argument("--n", type=int, default=1000)
    flags.add_argument("--dataset_name", default="trl-lib/tldr")
    flags.add_argument("--dataset_split", default="validation")
    flags.add_argument("--max_new_tokens", type=int, default=53)
    flags.add_argument("--temperature", type=float, default=0.01)
    flags.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    openai = "https://api.openai.com/v1" if os.environ.get("OPENAI_API_KEY") else None
    flags.add_argument("--judge_url", default=openai)
    flags.add_argument("--judge_model", default="gpt-4o-mini")
    args = flags.parse_args(argv)
    rows = Splits(args.dataset_name).load(args.dataset_split)
    summaries = generate_completions(
        args.model_name_or_path,
        rows.select(range(min(args.n, len(rows)))),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        engine=args.engine,
    )
    output = Path(args.output_path)
    if args.judge_url is not None:
        judge = Endpoint(args.judge_url, args.judge_model, cache=output.with_suffix(".sqlite"))
        names = ("prompt", "completion", "reference")
        prompts, ours, theirs = ([str(row[name]) for row in summaries] for name in names)
        result = match(prompts, ours, theirs, judge)
        labels = {"win": "response1", "loss": "response0"}
        for row, judged in zip(summaries, result.rows, strict=True):
            row["preferred"] = labels.get(judged.outcome, judged.outcome)
        print("preferred")
        for name, count in Counter(row["preferred"] for row in summaries).most_common():
            print(f"{name}    {count}")
        low, high = result.interval()
        print(f"win rate {result.win_rate:.1%} ({low:.1%} .. {high:.1%})")
    write(output, summaries)
    print(f"{len(summaries)} summaries are in {output}")


if __name__ == "__main__":
    if code := run_command(main, sys.argv[1:], name="generate_tldr.py"):
        sys.exit(code)
