"""Stage ``data``: an untrained model, its tokenizer, and all texts."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kedge.demo.task import EOS, PAD, WORDS, write_post, write_summary

CARE = 0.45  # of the writers of supervised summaries
REFERENCE_CARE = 0.8  # of the writers of reference summaries
PROMPTS = 2_000  # number of prompts for PPO


def main() -> None:
    """Write everything to a folder."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output_dir", required=True, type=Path)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--supervised", type=int, default=22_400, help="summaries to learn from")
    flags.add_argument("--preferences", type=int, default=3_500, help="posts to compare answers on")
    flags.add_argument("--judged", type=int, default=500, help="held-out posts")
    args = flags.parse_args()
    model(args.output_dir / "model", args.seed)
    texts(args.output_dir / "supervised.jsonl", args.seed, args.supervised, care=CARE)
    posts(args.output_dir / "preferences.jsonl", args.seed, args.preferences)
    posts(args.output_dir / "prompts.jsonl", args.seed, PROMPTS)
    texts(args.output_dir / "held_out.jsonl", args.seed, args.judged, care=REFERENCE_CARE)


def model(folder: Path, seed: int) -> None:
    """A tokenizer with one token per word, and a transformer with 0.17 million weights."""
    vocabulary = {word: i for i, word in enumerate([PAD, EOS, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, eos_token=EOS, padding_side="left"
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        # larger heads and RoPE base leave dimensions unrotated by position, for matching words
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def texts(file: Path, seed: int, rows: int, *, care: float) -> None:
    """Posts with summaries by writers with this care."""
    rng = random.Random(f"{file.stem} {seed}")
    written = [write_post(rng) for _ in range(rows)]
    write(
        file, [{"prompt": p.text, "completion": write_summary(p, rng, care=care)} for p in written]
    )


def posts(file: Path, seed: int, rows: int) -> None:
    """Posts without summaries."""
    rng = random.Random(f"{file.stem} {seed}")
    write(file, [{"prompt": write_post(rng).text} for _ in range(rows)])


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write one row per line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
