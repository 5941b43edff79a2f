"""A file of prompts and a model without weights."""

import json

import pytest


@pytest.fixture
def rows(tmp_path):
    """A file of 30 prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Day {i}"}) + "\n" for i in range(30)))
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny model's configuration and tokenizer, and no weights at all."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    words = {w: i for i, w in enumerate(["<unk>", "</s>", "Day", *map(str, range(30))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder
