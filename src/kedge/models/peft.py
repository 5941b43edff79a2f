"""Policies that train an adapter on a frozen base."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from kedge.records.errors import ConfigError, install_command

# Names of adapters on the policy's base (models/shared_base.py).
VALUE_ADAPTER, REWARD_ADAPTER = "kedge_value", "kedge_reward"
REFERENCE_ADAPTER = "kedge_reference"
_SHARING = (VALUE_ADAPTER, REWARD_ADAPTER, REFERENCE_ADAPTER)


class AdapterSwitch:
    """Selects the active adapter of a PEFT model, without changing what trains.

    PEFT's own ``set_adapter`` and ``disable_adapter`` also set ``requires_grad``.  Create it after
    all adapters were added.
    """

    def __init__(self, policy: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        self._layers: list[Any] = [m for m in policy.modules() if isinstance(m, kinds)]

    @contextmanager
    def active(self, name: str | None) -> Iterator[None]:
        """Context in which only this adapter is active; None: the base model alone."""
        with self._set([_selected(layer, name) for layer in self._layers]):
            yield

    @contextmanager
    def _set(self, states: list[tuple[Any, bool]]) -> Iterator[None]:
        before = self._states()
        try:
            for layer, state in zip(self._layers, states, strict=True):
                layer._active_adapter, layer._disable_adapters = state
            yield
        finally:
            for layer, state in zip(self._layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = state

    def _states(self) -> list[tuple[Any, bool]]:
        return [(layer._active_adapter, layer._disable_adapters) for layer in self._layers]

    def at_recompute(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """``context_fn`` of torch's checkpointing: recompute with the adapter of the forward."""
        return nullcontext(), self._set(self._states())


def _selected(layer: Any, name: str | None) -> tuple[Any, bool]:
    """The active adapters of a layer, and whether only the base is active."""
    if name is None:
        return layer._active_adapter, True
    known = getattr(layer, "_adapters", None)  # modules_to_save may lack it
    return ([name] if known is None or name in known else []), False


def adapter_parameters(policy: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """The weights of one adapter."""
    return {n: p for n, p in policy.named_parameters() if name in n.split(".")}


def own_adapters(policy: nn.Module) -> dict[str, Any]:
    """Arguments of ``save_pretrained`` that leave out adapters that are not the policy's."""
    names = [*getattr(policy, "peft_config", {})]
    own = [name for name in names if name not in _SHARING]
    return {} if own == names else {"selected_adapters": own}


def drop_adapters(policy: nn.Module) -> nn.Module:
    """Remove adapters that are not the policy's from a copy of it; returns it."""
    model: Any = policy
    for name in _SHARING:
        if name in getattr(model, "peft_config", {}):
            model.delete_adapter(name)
    return policy


def _add_adapter(model: Any, peft_config: Any, name: str) -> Any:
    from peft import get_peft_model, prepare_model_for_kbit_training

    if is_quantized(model):
        for module in model.modules():  # bitsandbytes' inference kernel has no gradient
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    try:
        with without_notices():
            return get_peft_model(model, peft_config, adapter_name=name)
    except ValueError as error:  # no layer has a target's name
        raise ConfigError(f"peft_config does not fit the policy: {error}") from error


def with_adapter(
    policy: nn.Module, peft_config: Any = None, adapter: str | None = None
) -> nn.Module:
    """A policy whose only trainable weights are those of one adapter, in float32.

    ``peft_config`` is for a new adapter, and None for a PEFT model.  The trained ``adapter`` is by
    default "default", or the active one.
    """
    if find_spec("peft") is None:
        raise ConfigError(f"adapters need peft: {install_command('peft')}")
    from peft import PeftModel

    model: Any = policy
    if not isinstance(policy, PeftModel):
        if peft_config is None:
            raise ConfigError(
                f"model_adapter_name={adapter!r}, but the model has no adapter; pass peft_config"
            )
        model = _add_adapter(model, peft_config, adapter or "default")
    elif peft_config is not None:
        raise ConfigError(
            "peft_config was given, but the model has an adapter already; merge it first "
            "(model.merge_and_unload()), or omit peft_config to continue training it"
        )
    name = adapter or model.active_adapter
    if name not in model.peft_config:
        raise ConfigError(
            f"model_adapter_name={name!r}: the model's adapters are {', '.join(model.peft_config)}"
        )
    if model.peft_config[name].is_prompt_learning:
        raise ConfigError(
            f"{type(model.peft_config[name]).__name__} puts virtual tokens before the prompt, "
            "which training would treat as text; use LoRA or another adapter of weights"
        )
    model.set_adapter(name)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.float32)
    return model


@contextmanager
def without_notices() -> Iterator[None]:
    """Silence a warning that peft triggers in transformers 5."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield


def is_quantized(model: nn.Module) -> bool:
    """Whether the weights have 4 or 8 bits."""
    return bool(
        getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    )


def quantization(bits: Literal[4, 8]) -> Any:
    """Quantization config for the frozen base of ``load_policy``: NF4 or LLM.int8.

    QLoRA (arXiv:2305.14314, sec. 3); LLM.int8() (arXiv:2208.07339).
    """
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"a {bits}-bit base needs bitsandbytes: pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
