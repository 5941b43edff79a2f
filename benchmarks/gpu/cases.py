"""The models, sizes and cases of the GPU benchmark, the same for every library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

PROMPT, EPOCHS = 128, 4
QWEN = {"vocab_size": 151_936, "tie_word_embeddings": True, "max_position_embeddings": 4096}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "qwen2",
        QWEN
        | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        | {"num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        QWEN
        | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
        | {"num_attention_heads": 12, "num_key_value_heads": 2},
    ),
    "pythia-1b": (
        "gpt_neox",
        {"vocab_size": 50_304, "max_position_embeddings": 2048}
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 8},
    ),
    "tiny": (  # tries the benchmark itself
        "qwen2",
        {"vocab_size": 512, "tie_word_embeddings": True}
        | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
}


@dataclass(frozen=True)
class Case:
    """One run: ``library method shape``, and its sizes."""

    library: str  # kedge or trl
    method: str  # ppo, rloo or grpo
    shape: str
    batch: int = 64
    micro: int = 16
    response: int = 256
    iterations: int = 3
    checkpointing: bool = False
    engine: str = "embedded"


def build_config(shape: str) -> Any:
    """The transformers configuration of a shape; weights are random."""
    from transformers import AutoConfig

    kind, sizes = SHAPES[shape]
    return AutoConfig.for_model(kind, **sizes, bos_token_id=0, eos_token_id=0, pad_token_id=1)


def build_models(shape: str, *, all_four: bool) -> dict[str, Any]:
    """The policy; with all four also reference, reward and value model.  Frozen ones in bf16."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = build_config(shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        models = {"policy": AutoModelForCausalLM.from_config(config, dtype=torch.float32)}
        if not all_four:
            return models
        models["reference"] = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        models["reference"].load_state_dict(models["policy"].state_dict())
        config.num_labels = 1
        build = AutoModelForSequenceClassification.from_config
        models["reward"] = build(config, dtype=torch.bfloat16)
        models["value"] = build(config, dtype=torch.float32)
    return models


def build_tokenizer(shape: str) -> Any:
    """A tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = SHAPES[shape][1]["vocab_size"]
    words = {"<eos>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def build_prompts(shape: str, rows: int) -> list[list[int]]:
    """Token ids of prompts of 32 to 128 random tokens."""
    generator = torch.Generator().manual_seed(1)
    size = SHAPES[shape][1]["vocab_size"]
    lengths = torch.randint(32, PROMPT + 1, (rows,), generator=generator).tolist()
    return [torch.randint(2, size, (n,), generator=generator).tolist() for n in lengths]
