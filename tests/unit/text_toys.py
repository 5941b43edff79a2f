"""Small tokenizers, reward models and rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from kedge.records.types import PromptBatch, Rollout

EOS, PAD = 0, 1
REWARD = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.5},
    **{"num_labels": 1, "pad_token_id": EOS},
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] }}"
    "{% if not loop.last or not continue_final_message %}{{ ' <eos> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def word_tokenizer(
    words: Sequence[str] = (), *, pad: bool = True, eos: bool = True, **options: Any
) -> PreTrainedTokenizerFast:
    """One token per word: <eos> <pad> <unk>, then ``words`` (w3 ... w31 by default)."""
    vocab = ["<eos>", "<pad>", "<unk>", *(words or [f"w{i}" for i in range(3, 32)])]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocab)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>"} | ({"pad_token": "<pad>"} if pad else {})
    names |= {"eos_token": "<eos>"} if eos else {}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names, **options)


def eos_adding_tokenizer() -> PreTrainedTokenizerFast:
    """Like T5's: every text ends with <eos>."""
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", EOS)]
    )
    return tokenizer


def blank_swallowing_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama's: words carry their blank, and decoding drops the first one."""
    words = {"<eos>": 0, "<pad>": 1, "<unk>": 2, "\u2581a": 3, "\u2581b": 4, "c": 5}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def neox_reward(vocab: int = 32, labels: int = 1, seed: int = 0, **options: Any) -> Any:
    """A causal reward model with large random weights, so that every token matters."""
    torch.manual_seed(seed)
    shape = REWARD | {"vocab_size": vocab, "num_labels": labels} | options
    return GPTNeoXForSequenceClassification(GPTNeoXConfig(**shape))


def bert_reward(vocab: int = 32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(**REWARD | {"vocab_size": vocab}))


def rollout_of(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    finished: Sequence[bool] | None = None,
    pad: int = PAD,
    extra: int = 0,
    **columns: list[Any],
) -> Rollout:
    """Prompts left-padded and responses right-padded with ``pad``, ``extra`` slots to spare."""
    width = max(len(p) for p, _ in pairs) + extra
    room = max(len(r) for _, r in pairs) + extra
    lengths = torch.tensor([[len(p), len(r)] for p, r in pairs])
    present = torch.arange(room) < lengths[:, 1:]
    count = len(pairs)
    return Rollout(
        prompts=PromptBatch(
            ids=torch.tensor([[pad] * (width - len(p)) + list(p) for p, _ in pairs]),
            mask=torch.arange(width) >= width - lengths[:, :1],
            group=torch.arange(count),
            row=torch.arange(count),
            columns=columns,
        ),
        ids=torch.tensor([list(r) + [pad] * (room - len(r)) for _, r in pairs]).long(),
        loss_mask=present,
        response_mask=present,
        terminated=torch.tensor(
            [bool(r) and r[-1] == EOS for _, r in pairs] if finished is None else finished
        ),
        policy_version=torch.zeros(count, dtype=torch.long),
    )


def weightless_model(folder: Path) -> Path:
    """A folder with a tiny model's configuration and tokenizer, and no weights at all."""
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
