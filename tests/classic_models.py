"""Tiny tokenizers and models for tests of the classic API."""

from __future__ import annotations

import warnings
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


def samples(seed: int = 0, size: int = 8) -> tuple[list[Any], list[Any], list[Any]]:
    """Queries of 3 to 5 tokens, responses of 4 to 7, and scores."""
    import torch

    g = torch.Generator().manual_seed(seed)

    def row(n: int) -> Any:
        return torch.randint(2, 28, (n,), generator=g)

    queries, responses = ([row(low + i % 3) for i in range(size)] for low in (3, 4))
    responses = [r if i % 2 else torch.cat([r, torch.tensor([0])]) for i, r in enumerate(responses)]
    return queries, responses, list(torch.randn(size, generator=g))


def trainer(
    base: Any,
    *,
    sgd: float | None = None,
    decay: float | None = None,
    reference: Any = None,
    peft_config: Any = None,
    num_shared_layers: int | None = None,
    dataset: Any = None,
    kind: Any = None,
    collator: Any = None,
    **options: Any,
) -> Any:
    """A classic trainer of a tiny model, 8 samples a step; ``kind`` is a subclass of it."""
    import torch

    from kedge.ext.trl.classic import (
        AutoModelForCausalLMWithValueHead,
        AutoModelForSeq2SeqLMWithValueHead,
        PPOConfig,
        PPOTrainer,
    )

    encodes = base.config.is_encoder_decoder
    head = AutoModelForSeq2SeqLMWithValueHead if encodes else AutoModelForCausalLMWithValueHead
    model = head.from_pretrained(base, peft_config=peft_config)
    optimizer = None if sgd is None else torch.optim.SGD(model.parameters(), lr=sgd)
    scheduler = None
    if decay is not None:
        assert optimizer is not None
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    sizes = {"batch_size": 8, "mini_batch_size": 4, "gradient_accumulation_steps": 2}
    if "mini_batch_size" in options:
        sizes.pop("gradient_accumulation_steps")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no dataset was given")
        return (kind or PPOTrainer)(
            PPOConfig(**{**sizes, "learning_rate": 1e-3, **options}),
            model,
            None if reference is None else reference(model),
            letters(28),
            dataset,
            optimizer,
            num_shared_layers=num_shared_layers,
            lr_scheduler=scheduler,
            training_data_collator=collator,
        )


def watching(name: str, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> type:
    """A subclass of the trainer whose method ``name`` records its arguments."""
    from kedge.ext.trl.classic import PPOTrainer

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return getattr(PPOTrainer, name)(self, *args, **kwargs)

    return type("Watching", (PPOTrainer,), {name: method})


def moved(kind: type | None, make: Any = gpt2, **options: Any) -> tuple[Any, Any, Any]:
    """The change of the weights by the second of two iterations, the trainer, its statistics."""
    import torch

    def weights() -> Any:
        return torch.cat([p.detach().flatten() for p in learner.model.parameters()])

    learner = trainer(make(), kind=kind, **{"sgd": 0.1, "ppo_epochs": 2} | options)
    learner.step(*samples(seed=9))
    before = weights()
    stats = learner.step(*samples(seed=1))
    return weights() - before, learner, stats
