"""What both sides train: models, prompts and sizes.  Imports nothing but torch and transformers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SHARED = Path(os.environ.get("KEDGE_SHARED", Path(__file__).parents[3] / "shared"))
RESPONSE = 53
EPOCHS = 4


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    batch: int
    shape: dict[str, Any] | None = None  # of random models; None: stories260k from the shared data
    family: str = "gpt_neox"  # model type of transformers
    lora: bool = False  # the policy trains an adapter, and its base is the reference


PYTHIA = {"vocab_size": 50_304, "max_position_embeddings": 512}
QWEN = {  # Qwen2.5-0.5B
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
CASES = {
    "stories260k": Case("stories260k", 64),
    "pythia-14m": Case(
        "pythia-14m",
        16,
        PYTHIA
        | {
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
        },
    ),
    "pythia-160m": Case(
        "pythia-160m",
        8,
        PYTHIA
        | {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
    ),
    "qwen-0.5b-lora": Case("qwen-0.5b-lora", 4, QWEN, "qwen2", lora=True),
}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter(task: str) -> Any:
    """LoRA of rank 16 on all linear layers of the blocks."""
    from peft import LoraConfig

    return LoraConfig(task_type=task, r=16, lora_alpha=32, target_modules=LAYERS)


def value_with_adapter(value: Any) -> Any:
    """A value model of which the adapter and the head train, as TRL reads it."""
    from peft import get_peft_model

    return get_peft_model(value, adapter("SEQ_CLS")).get_base_model()


def models(case: Case, *, value: bool = True) -> tuple[Any, Any, Any, Any]:
    """Policy, reference, reward and value model, float32, the same on both sides.

    With LoRA there is no reference, and without ``value`` no value model.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    if case.shape is None:
        data = SHARED / "data"
        policy, reference = (
            AutoModelForCausalLM.from_pretrained(data / "stories260k") for _ in range(2)
        )
        reward, critic = (
            AutoModelForSequenceClassification.from_pretrained(
                data / "stories260k-sentiment", num_labels=1
            )
            for _ in range(2)
        )
        return policy, reference, reward, critic
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    config = AutoConfig.for_model(case.family, **case.shape, **special)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(config)
    reference = None if case.lora else AutoModelForCausalLM.from_config(config)
    if reference is not None:
        reference.load_state_dict(policy.state_dict())
    config.num_labels = 1
    reward = AutoModelForSequenceClassification.from_config(config)
    critic = AutoModelForSequenceClassification.from_config(config) if value else None
    if critic is not None:
        critic.load_state_dict(reward.state_dict())
    return policy, reference, reward, critic


def tokenizer(case: Case) -> Any:
    """The stories tokenizer, or one whose words are numbers for the random models."""
    from transformers import PreTrainedTokenizerFast

    if case.shape is None:  # the class that its files name is unknown to older transformers
        folder = SHARED / "data" / "stories260k"
        return PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<eos>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, case.shape["vocab_size"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def prompts(case: Case, rows: int) -> list[list[int]]:
    """Token ids: story openings, or 32 to 128 random tokens."""
    if case.shape is None:
        made = tokenizer(case)
        lines = (SHARED / "data" / "story-prompts" / "train.jsonl").read_text().splitlines()
        texts = [json.loads(line)["prompt"] for line in lines]
        return [made(texts[i % len(texts)])["input_ids"] for i in range(rows)]
    rng = torch.Generator().manual_seed(1)
    lengths = torch.randint(32, 129, (rows,), generator=rng).tolist()
    return [
        torch.randint(2, case.shape["vocab_size"], (n,), generator=rng).tolist() for n in lengths
    ]
