"""A verifiable task on a CPU: sums of two numbers, an exact-answer verifier, and GRPO.

python examples/arithmetic/run.py               about three minutes on one thread
python examples/arithmetic/run.py --quick       the same with little training, as a smoke test

A small, newly initialized transformer is trained on sums of which most are wrong, so that its
greedy answer to a new sum is correct less than 40% of the time.  GRPO then trains on problems with
a verifier, without answers.  Accuracy is measured on held-out sums.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kedge import GRPOConfig, GRPOTrainer
from kedge.records.types import PromptBatch, Sampling
from kedge.reporting.base import format_duration
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.verifiers import exact_match

LARGEST = 99
HELD_OUT = 500
CARELESS = 0.7  # share of wrong answers in supervised training
LENGTH = 4  # tokens of the longest answer, including the stop token
console = Console()


@dataclass(frozen=True)
class Sizes:
    """Sizes of both training stages."""

    supervised_rows: int = 50_000
    iterations: int = 200


QUICK = Sizes(supervised_rows=512, iterations=3)


def problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Sums for training, and held-out sums for evaluation."""
    sums = [
        {"prompt": f"{a:02}+{b:02}=", "ground_truth": str(a + b)}
        for a in range(LARGEST + 1)
        for b in range(LARGEST + 1)
    ]
    random.Random("arithmetic").shuffle(sums)
    return sums[HELD_OUT:], sums[:HELD_OUT]


def careless(prompt: str) -> str:
    """The sum without carrying."""
    a, b = map(int, prompt.rstrip("=").split("+"))
    return str((a // 10 + b // 10) % 10 * 10 + (a + b) % 10)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<eos>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A transformer with 0.4 million weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=32,
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def supervise(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[dict[str, str]],
    sizes: Sizes,
    folder: Path,
    seed: int,
) -> None:
    """Supervised training on answers of which most are wrong, with TRL's trainer."""
    from trl import SFTConfig, SFTTrainer

    rng = random.Random(f"supervised {seed}")
    samples = [rng.choice(rows) for _ in range(sizes.supervised_rows)]
    answers = [
        careless(row["prompt"]) if rng.random() < CARELESS else row["ground_truth"]
        for row in samples
    ]
    data = [
        {"prompt": row["prompt"], "completion": answer + "<eos>"}
        for row, answer in zip(samples, answers, strict=True)
    ]
    SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=128,
            num_train_epochs=1,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            logging_steps=max(1, sizes.supervised_rows // 128 // 5),
            save_strategy="no",
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            max_length=None,
            completion_only_loss=True,
            seed=seed,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
    ).train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, rows: Sequence[dict[str, str]]) -> float:
    """Share of problems with a correct greedy answer."""
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    order = torch.arange(len(rows))
    prompts = PromptBatch(
        ids=batch["input_ids"], mask=batch["attention_mask"].bool(), group=order, row=order
    )
    engine = EmbeddedEngine(model, pad_id=tokenizer.pad_token_id, chunk_rows=256)
    greedy = Sampling(max_new_tokens=LENGTH, temperature=0.0, stop_ids=(tokenizer.eos_token_id,))
    rollout = engine.generate(prompts, sampling=greedy, seed=0)
    texts = [
        tokenizer.decode(ids[mask], skip_special_tokens=True)
        for ids, mask in zip(rollout.ids, rollout.loss_mask, strict=True)
    ]
    correct = exact_match(texts, ground_truth=[row["ground_truth"] for row in rows])
    return sum(correct) / len(rows)


def reinforce(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    sizes: Sizes,
    folder: Path,
    seed: int,
) -> GRPOTrainer:
    """GRPO on problems with a verifier as reward."""
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact_match,
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=512,
            num_generations=8,
            response_length=LENGTH,
            max_steps=sizes.iterations,
            learning_rate=3e-4,
            warmup_steps=10,
            temperature=1.0,
            stop_token="eos",
            gradient_checkpointing=False,
            logging_steps=max(1, sizes.iterations // 20),
            save_strategy="no",
            overwrite_output_dir=True,
            num_sample_generations=0,
            use_cpu=True,
            seed=seed,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    return trainer


def main() -> None:
    """Train, evaluate, and write everything to a folder."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--output_dir", default="runs/arithmetic")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--iterations", type=int, help="of GRPO; 200 if not given")
    flags.add_argument("--quick", action="store_true", help="little training, as a smoke test")
    flags = flags.parse_args()
    folder, sizes = Path(flags.output_dir), QUICK if flags.quick else Sizes()
    if flags.iterations is not None:
        sizes = replace(sizes, iterations=flags.iterations)
    begin = time.perf_counter()
    train, held_out = problems()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, flags.seed)

    console.rule("1. supervised model")
    supervise(model, tokenizer, train, sizes, folder / "sft", flags.seed)
    before = accuracy(model, tokenizer, held_out)
    console.print(f"greedy accuracy on {len(held_out)} new sums: {before:.1%}")

    console.rule("2. GRPO")
    middle = time.perf_counter()
    trainer = reinforce(model, tokenizer, train, sizes, folder / "grpo", flags.seed)
    after = accuracy(trainer.model, tokenizer, held_out)
    now = time.perf_counter()
    result = {
        "accuracy_start": before,
        "accuracy": after,
        "seconds": round(now - begin, 1),
        "seconds_grpo": round(now - middle, 1),
    }
    folder.joinpath("summary.json").write_text(json.dumps(result, indent=2) + "\n")
    table = Table("", "supervised", "GRPO", title="result", title_justify="left")
    table.add_row("greedy accuracy on new sums", f"{before:.1%}", f"{after:.1%}")
    console.print(table)
    console.print(f"{format_duration(result['seconds'])}. Models and curves are in {folder}")


if __name__ == "__main__":
    main()
