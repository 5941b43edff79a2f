"""Train a language model to write positive text, scored by a sentiment classifier.

    python examples/classic/sentiment.py \\
        --model_name lvwerra/gpt2-imdb --reward_model lvwerra/distilbert-imdb \\
        --dataset stanfordnlp/imdb --column text --batch_size 64 --mini_batch_size 16
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from tqdm import tqdm
from transformers import AutoTokenizer, HfArgumentParser, pipeline

from kedge.classic import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    set_seed,
)


@dataclass
class ScriptArguments:
    """Options of this script; all other flags are those of PPOConfig."""

    dataset: str = "stanfordnlp/imdb"  # a .jsonl file, or a name on the hub
    column: str = "text"
    max_steps: int = 100
    shortest_query: int = 2  # tokens
    longest_query: int = 8
    max_new_tokens: int = 32
    output_dir: str = "sentiment-model"


def queries(args: ScriptArguments, tokenizer: AutoTokenizer) -> Dataset:
    """Beginnings of texts, truncated at a random length."""
    if Path(args.dataset).exists():
        rows = load_dataset("json", data_files=args.dataset, split="train")
    else:
        rows = load_dataset(args.dataset, split="train")
        rows = rows.filter(lambda row: len(row[args.column]) > 200)
    length = LengthSampler(args.shortest_query, args.longest_query + 1)

    def begin(row: dict) -> dict:
        ids = tokenizer.encode(row[args.column])[: length()]
        return {"input_ids": ids, "query": tokenizer.decode(ids, skip_special_tokens=True)}

    return rows.map(begin, remove_columns=rows.column_names)


def main(args: ScriptArguments, config: PPOConfig) -> list[float]:
    """Train; returns the mean score of each step."""
    set_seed(config.seed)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    classifier = pipeline("text-classification", model=config.reward_model)
    raw = {"top_k": None, "function_to_apply": "none", "batch_size": 16}
    positive = classifier.model.config.id2label[classifier.model.config.num_labels - 1]
    trainer = PPOTrainer(config, model, None, tokenizer, dataset=queries(args, tokenizer))
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": args.max_new_tokens}
    means: list[float] = []
    progress = tqdm(total=args.max_steps)
    while len(means) < args.max_steps:
        for batch in trainer.dataloader:
            query_tensors = batch["input_ids"]
            response_tensors = trainer.generate(
                query_tensors, batch_size=config.batch_size, return_prompt=False, **options
            )
            batch["response"] = tokenizer.batch_decode(response_tensors, skip_special_tokens=True)
            texts = [q + " " + r for q, r in zip(batch["query"], batch["response"], strict=True)]
            scores = [{x["label"]: x["score"] for x in row} for row in classifier(texts, **raw)]
            rewards = [torch.tensor(row[positive]) for row in scores]
            stats = trainer.step(query_tensors, response_tensors, rewards)
            trainer.log_stats(stats, batch, rewards)
            means.append(stats["ppo/mean_scores"])
            progress.set_postfix(score=means[-1], kl=stats["objective/kl"])
            progress.update()
            if len(means) == args.max_steps:
                break
    trainer.save_pretrained(args.output_dir)
    return means


if __name__ == "__main__":
    main(*HfArgumentParser((ScriptArguments, PPOConfig)).parse_args_into_dataclasses())
