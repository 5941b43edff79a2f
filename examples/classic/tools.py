"""Train a language model to use a calculator, by PPO over episodes with several turns.

python examples/classic/tools.py --model_name gpt2 --batch_size 64 --mini_batch_size 16
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import torch
from tqdm import trange
from transformers import AutoTokenizer, HfArgumentParser

from kedge.classic import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    TextEnvironment,
    set_seed,
)
from kedge.environments.games import calculate

PROMPT = """\
What is 13 - 3?
<request><calculate>13 - 3<call>10<response>
Result=10<submit>
What is 4 + 30?
<request><calculate>4 + 30<call>34<response>
Result=34<submit>
"""


@dataclass
class ScriptArguments:
    """Options of this script; all other flags are those of PPOConfig."""

    max_steps: int = 100
    max_turns: int = 2
    max_new_tokens: int = 32  # of one turn
    largest: int = 50
    output_dir: str = "calculator-model"


def draw_tasks(rng: random.Random, count: int, largest: int) -> tuple[list[str], list[int]]:
    """Sums and differences, and their results."""
    tasks, answers = [], []
    for _ in range(count):
        left, right, sign = rng.randint(0, largest), rng.randint(0, largest), rng.choice((1, -1))
        tasks.append(f"What is {left} {'+' if sign > 0 else '-'} {right}?\n")
        answers.append(left + sign * right)
    return tasks, answers


def correct(responses: list[str], answers: list[int]) -> list[torch.Tensor]:
    """1 if the submitted result is right, else 0."""
    results = [re.search(r"Result\s*=\s*(-?\d+)\s*<submit>", response) for response in responses]
    return [
        torch.tensor(float(result is not None and int(result[1]) == answer))
        for result, answer in zip(results, answers, strict=True)
    ]


def main(args: ScriptArguments, config: PPOConfig) -> list[float]:
    """Train; returns the share of right answers at each step."""
    set_seed(config.seed)
    rng = random.Random(config.seed)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = PPOTrainer(config, model, None, tokenizer)
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": args.max_new_tokens}
    world = TextEnvironment(
        model, tokenizer, [calculate], correct, PROMPT, args.max_turns, generation_kwargs=options
    )
    means: list[float] = []
    for _ in trange(args.max_steps):
        tasks, answers = draw_tasks(rng, config.batch_size, args.largest)
        queries, responses, masks, rewards, _ = world.run(tasks, answers=answers)
        stats = trainer.step(queries, responses, rewards, masks)
        batch = {"query": tasks, "response": tokenizer.batch_decode(responses)}
        trainer.log_stats(stats, batch, rewards)
        means.append(torch.stack(rewards).mean().item())
    trainer.save_pretrained(args.output_dir)
    return means


if __name__ == "__main__":
    main(*HfArgumentParser((ScriptArguments, PPOConfig)).parse_args_into_dataclasses())
