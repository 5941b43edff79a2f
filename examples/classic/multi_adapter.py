"""One base model for three: policy and reward model are adapters, the reference has none.

    python examples/classic/multi_adapter.py --model_name huggyllama/llama-7b \\
        --reward_adapter trl-lib/llama-7b-hh-rm-adapter --load_in_4bit \\
        --batch_size 8 --mini_batch_size 2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import LoraConfig
from transformers import AutoTokenizer, HfArgumentParser

from kedge.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

QUESTIONS = ["How do I bake bread?", "Why is the sky blue?", "What makes a good friend?"]


@dataclass
class ScriptArguments:
    """Options of this script; all other flags are those of PPOConfig."""

    reward_adapter: str = "reward-adapter"  # trained with task_type SEQ_CLS on the same base
    load_in_4bit: bool = False  # needs bitsandbytes
    lora_r: int = 16
    lora_alpha: int = 32
    target_modules: str = "q_proj,v_proj"
    max_steps: int = 50
    max_new_tokens: int = 32
    output_dir: str = "adapter"


def main(args: ScriptArguments, config: PPOConfig) -> list[float]:
    """Train; returns the mean score of each step."""
    lora = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        target_modules=args.target_modules.split(","),
        task_type="CAUSAL_LM",
    )
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        config.model_name,
        peft_config=lora,
        reward_adapter=args.reward_adapter,
        load_in_4bit=args.load_in_4bit,
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = PPOTrainer(config, model, tokenizer=tokenizer)
    texts = [f"Question: {QUESTIONS[i % 3]}\n\nAnswer:" for i in range(config.batch_size)]
    queries = [torch.tensor(tokenizer.encode(text)) for text in texts]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": args.max_new_tokens}
    means = []
    for step in range(args.max_steps):
        responses = trainer.generate(
            queries, batch_size=config.batch_size, return_prompt=False, **options
        )
        rewards = []
        for query, response in zip(queries, responses, strict=True):
            ids = torch.cat([query.to(response), response])[None]
            rewards.append(trainer.model.compute_reward_score(ids)[0, -1, 0].cpu())
        stats = trainer.step(queries, responses, rewards)
        answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
        trainer.log_stats(stats, {"query": texts, "response": answers}, rewards)
        means.append(stats["ppo/mean_scores"])
        print(f"step {step}: score {means[-1]:.3f}, KL {stats['objective/kl']:.2f}")
    trainer.save_pretrained(args.output_dir)
    return means


if __name__ == "__main__":
    main(*HfArgumentParser((ScriptArguments, PPOConfig)).parse_args_into_dataclasses())
