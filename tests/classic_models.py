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


def gpt2(seed: int = 0, **changes: Any) -> Any:
    """A GPT-2 of two layers over ``letters()``."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": 28, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    ends = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**sizes | ends | changes))


def t5(seed: int = 0, **changes: Any) -> Any:
    """A T5 of two layers over ``letters()``; its decoder starts with the padding token."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    sizes = {"vocab_size": 28, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2}
    ends = {"decoder_start_token_id": 1, "eos_token_id": 0, "pad_token_id": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes | ends | changes))


def bart(seed: int = 0) -> Any:
    """A BART of two layers over ``letters()``, with a bias on its logits."""
    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(seed)
    sizes = {"vocab_size": 28, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    wide = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
    ends = {"decoder_start_token_id": 0, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    model = BartForConditionalGeneration(
        BartConfig(**sizes | heads | wide | ends, forced_eos_token_id=None)
    )
    model.final_logits_bias.normal_()
    return model


def lora(**changes: Any) -> Any:
    """Adapters of rank 4 on GPT-2's attention."""
    from peft import LoraConfig

    return LoraConfig(
        **{"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
        | changes
    )
