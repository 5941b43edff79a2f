"""An encoder-decoder: summaries should be short and use words of their text.

    python examples/classic/seq2seq.py --model_name google-t5/t5-small \\
        --dataset texts.jsonl --batch_size 16 --mini_batch_size 4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, HfArgumentParser

from kedge.classic import AutoModelForSeq2SeqLMWithValueHead, PPOConfig, PPOTrainer


@dataclass
class ScriptArguments:
    """Options of this script; all other flags are those of PPOConfig."""

    dataset: str = "texts.jsonl"  # a .jsonl file
    column: str = "text"
    prefix: str = "summarize: "
    max_steps: int = 50
    max_new_tokens: int = 24
    output_dir: str = "summary-model"


def faithful(text: str, summary: str, wanted: int = 8) -> float:
    """Share of the summary's words found in the text, minus 0.05 per word beyond ``wanted``."""
    words = summary.lower().split()
    if not words:
        return 0.0
    known = sum(word in text.lower() for word in words) / len(words)
    return known - 0.05 * max(len(words) - wanted, 0)


def main(args: ScriptArguments, config: PPOConfig) -> list[float]:
    """Train; returns the mean reward of each step."""
    model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(config.model_name)
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    rows = load_dataset("json", data_files=args.dataset, split="train")
    rows = rows.map(
        lambda row: {"query": args.prefix + row[args.column]}, remove_columns=rows.column_names
    )
    trainer = PPOTrainer(config, model, tokenizer=tokenizer, dataset=rows)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": args.max_new_tokens}
    means: list[float] = []
    while len(means) < args.max_steps:
        for batch in trainer.dataloader:
            responses = trainer.generate(
                batch["input_ids"], batch_size=config.batch_size, **options
            )
            batch["response"] = tokenizer.batch_decode(responses, skip_special_tokens=True)
            rewards = [
                torch.tensor(faithful(query, response))
                for query, response in zip(batch["query"], batch["response"], strict=True)
            ]
            stats = trainer.step(batch["input_ids"], responses, rewards)
            trainer.log_stats(stats, batch, rewards)
            means.append(stats["ppo/mean_scores"])
            print(f"step {len(means)}: reward {means[-1]:.3f}, KL {stats['objective/kl']:.2f}")
            if len(means) == args.max_steps:
                break
    trainer.save_pretrained(args.output_dir)
    return means


if __name__ == "__main__":
    main(*HfArgumentParser((ScriptArguments, PPOConfig)).parse_args_into_dataclasses())
