"""Policies that train an adapter on a frozen base."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from kedge.errors import ConfigError


def _wrapped(model: Any, peft_config: Any, name: str) -> Any:
    from peft import get_peft_model

    try:
        with without_notices():
            return get_peft_model(model, peft_config, adapter_name=name)
    except ValueError as error:  # no layer has the name of a target
        raise ConfigError(f"peft_config does not fit the policy: {error}") from error


def with_adapter(
    policy: nn.Module, peft_config: Any = None, adapter: str | None = None
) -> nn.Module:
    """A policy whose only trainable weights are those of one adapter, in float32.

    Args:
        policy: causal language model, or a PEFT model.
        peft_config: makes a new adapter; None: the policy has one already.
        adapter: name of the adapter that trains; None: "default", or the one that is active.

    Raises:
        ConfigError: peft is not installed, both or neither of config and PEFT model are given, no
            adapter has that name, or the kind of adapter does not act inside the model.
    """
    if find_spec("peft") is None:
        raise ConfigError("adapters need peft: pip install 'kedge[peft]'")
    from peft import PeftModel, prepare_model_for_kbit_training

    made: Any = policy
    if not isinstance(policy, PeftModel):
        if peft_config is None:
            raise ConfigError(
                f"model_adapter_name={adapter!r}, but the model has no adapter; pass peft_config"
            )
        if is_quantized(policy):
            _with_gradients(made)
            made = prepare_model_for_kbit_training(made, use_gradient_checkpointing=False)
        made = _wrapped(made, peft_config, adapter or "default")
    elif peft_config is not None:
        raise ConfigError(
            "peft_config was given, but the model has an adapter already; merge it first "
            "(model.merge_and_unload()), or leave peft_config out to train on"
        )
    name = adapter or made.active_adapter
    if name not in made.peft_config:
        raise ConfigError(
            f"model_adapter_name={name!r}: the model's adapters are {', '.join(made.peft_config)}"
        )
    if made.peft_config[name].is_prompt_learning:
        raise ConfigError(
            f"{type(made.peft_config[name]).__name__} puts virtual tokens before the prompt, "
            "which training would take for text; use LoRA or another adapter of weights"
        )
    made.set_adapter(name)
    for p in made.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.float32)
    return made


@contextmanager
def without_notices() -> Iterator[None]:
    """Keep quiet what peft does to transformers 5 and nobody else can change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield


def _with_gradients(model: nn.Module) -> None:
    """Keep bitsandbytes from the kernel of CPUs that it takes in evaluation mode: no gradient."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def is_quantized(model: nn.Module) -> bool:
    """Whether the weights are held in 4 or 8 bits."""
    return bool(
        getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    )


def quantization(
    bits: Literal[4, 8], *, compute_dtype: torch.dtype = torch.bfloat16, nested: bool = False
) -> Any:
    """How ``load_policy`` shall quantize a frozen base: NF4 or LLM.int8.

    QLoRA (arXiv:2305.14314, sec. 3); LLM.int8() (arXiv:2208.07339).

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"a {bits}-bit base needs bitsandbytes: pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_use_double_quant=nested,
    )
