"""A small chat model for the games: a tokenizer trained on their texts, and an untrained Llama.

python examples/agent/model.py episodes.jsonl FOLDER    for the episodes of `kedge expert`
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<user>", "<assistant>", "<end>"]
# A word with its space and punctuation is one token; so is each digit.
WORDS = Regex(r" ?[A-Za-z]+[.,:]?|[0-9]| ?[+-]|.")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<assistant>{% generation %}{{ message['content'] + '<end>' }}{% endgeneration %}"
    "{% else %}{{ '<user>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(texts: Iterable[str]) -> Any:
    """A byte-level tokenizer in which every frequent word of the texts is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        min_frequency=2,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
        padding_side="left",
    )


def make_model(tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """An untrained transformer of 0.15 million weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def save_untrained(folder: Path, texts: Iterable[str], seed: int) -> None:
    """Write model and tokenizer to a folder."""
    tokenizer = make_tokenizer(texts)
    make_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a folder."""
    return LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    save_untrained(Path(sys.argv[2]), [m["content"] for r in rows for m in r["messages"]], seed=0)
