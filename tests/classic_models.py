"""Tiny tokenizers and models for tests of the classic API."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast


def letters(size: int = 32) -> Any:
    """A tokenizer of ``size`` one-letter words; 0 is the end, 1 pads."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["</s>", "<pad>", *(chr(ord("a") + i) for i in range(26))][:size]
    words += [f"w{i}" for i in range(len(words), size)]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="<pad>", unk_token="a"
    )
