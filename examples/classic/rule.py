"""A rule-based reward: responses should use as many different words as possible.

python examples/classic/rule.py --model_name gpt2 --batch_size 32 --mini_batch_size 8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoTokenizer, HfArgumentParser

from kedge.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

PROMPTS = ["Once upon a time", "The weather today", "My best friend", "In the kitchen"]


@dataclass
class ScriptArguments:
    """Options of this script; all other flags are those of PPOConfig."""

    max_steps: int = 50
    max_new_tokens: int = 24
    output_dir: str = "varied-model"


def variety(text: str) -> float:
    """Share of distinct words, 0 to 1."""
    words = text.lower().split()
    return len(set(words)) / len(words) if words else 0.0


def main(args: ScriptArguments, config: PPOConfig) -> list[float]:
    """Train; returns the mean reward of each step."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = PPOTrainer(config, model, tokenizer=tokenizer)
    texts = [PROMPTS[i % len(PROMPTS)] for i in range(config.batch_size)]
    queries = [torch.tensor(tokenizer.encode(text)) for text in texts]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": args.max_new_tokens}
    means = []
    for step in range(args.max_steps):
        responses = trainer.generate(
            queries, batch_size=config.batch_size, return_prompt=False, **options
        )
        answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
        rewards = [torch.tensor(variety(answer)) for answer in answers]
        stats = trainer.step(queries, responses, rewards)
        trainer.log_stats(stats, {"query": texts, "response": answers}, rewards)
        means.append(stats["ppo/mean_scores"])
        print(f"step {step}: reward {means[-1]:.3f}, KL {stats['objective/kl']:.2f}")
    trainer.save_pretrained(args.output_dir)
    return means


if __name__ == "__main__":
    main(*HfArgumentParser((ScriptArguments, PPOConfig)).parse_args_into_dataclasses())
