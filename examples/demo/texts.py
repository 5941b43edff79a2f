"""Stage ``data``: the untrained model, its tokenizer, and all texts."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from task import EOS, PAD, WORDS, write_post, write_summary
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CARE = 0.45  # of the writers whose summaries the supervised model learns from
REFERENCE_CARE = 0.8  # of those who wrote the references
PROMPTS = 2_000  # of PPO


def main() -> None:
    """Write everything to a folder."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output_dir", required=True, type=Path)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--supervised", type=int, default=20_000, help="summaries to learn from")
    flags.add_argument(
        "--preferences", type=int, default=10_000, help="posts to compare answers to"
    )
    flags.add_argument("--judged", type=int, default=500, help="held-out posts")
    asked = flags.parse_args()
    model(asked.output_dir / "model", asked.seed)
    texts(asked.output_dir / "supervised.jsonl", asked.seed, asked.supervised, care=CARE)
    posts(asked.output_dir / "preferences.jsonl", asked.seed, asked.preferences)
    posts(asked.output_dir / "prompts.jsonl", asked.seed, PROMPTS)
    texts(asked.output_dir / "held_out.jsonl", asked.seed, asked.judged, care=REFERENCE_CARE)


def model(folder: Path, seed: int) -> None:
    """A tokenizer of one token a word, and a transformer of 0.35 million weights."""
    vocabulary = {word: i for i, word in enumerate([PAD, EOS, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, eos_token=EOS, padding_side="left"
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def texts(file: Path, seed: int, rows: int, *, care: float) -> None:
    """Posts with the summaries of writers of this care."""
    rng = random.Random(f"{file.stem} {seed}")
    written = [write_post(rng) for _ in range(rows)]
    write(
        file, [{"prompt": p.text, "completion": write_summary(p, rng, care=care)} for p in written]
    )


def posts(file: Path, seed: int, rows: int) -> None:
    """Posts alone."""
    rng = random.Random(f"{file.stem} {seed}")
    write(file, [{"prompt": write_post(rng).text} for _ in range(rows)])


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """A row a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
