"""Attention of the models that Kedge runs, registered with transformers under a name of ours.

It computes what torch's attention does.  It is faster for single tokens on a GPU and under autocast
on a CPU, and it knows rows that are joined in one sequence (`joined_attention`).
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kedge.ops.gpu import OTHER, grouped_attention
from kedge.ops.joined_attention import Group, joined_attention
from kedge.ops.products import backend

_USUAL, _OWN = "sdpa", "kedge"
_OTHERS: set[type] = set()
_GROUPED = grouped_attention(ALL_ATTENTION_FUNCTIONS[_USUAL])
_WINDOWS = ("sliding_window", "attention_chunk_size")  # options that need a [T, T] mask


def use_own_attention(model: nn.Module) -> None:
    """Let a model that Kedge runs attend by `attend`, if it attends by torch's.

    Only the name in the model's configuration changes, for good: `attend` computes the same.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if not isinstance(module, PreTrainedModel) or type(module) in _OTHERS:
            continue
        if _attention_of(config) == _USUAL:
            with suppress(ValueError, ImportError):
                module.set_attn_implementation(_OWN)
            if _attention_of(config) == _USUAL:
                _OTHERS.add(type(module))  # it has attention of its own; asked once


def _attention_of(config: object) -> str | None:
    return getattr(config, "_attn_implementation", None)


def accepts_any_mask(model: nn.Module) -> bool:
    """Whether attention takes a mask bool [b, 1, n, S] as it is, the same for all layers."""
    config: Any = getattr(model, "config", None)
    known = _attention_of(config) in (_USUAL, _OWN) and not getattr(config, "alibi", False)
    return known and not has_windows(config)


def has_own_attention(model: object) -> bool:
    """Whether a model attends by `attend`."""
    return _attention_of(getattr(model, "config", None)) == _OWN


def has_windows(config: Any) -> bool:
    """Whether layers of a model attend to a part of the tokens, or in another way."""
    parts = (config, config.get_text_config())
    names = ("layer_types", "layers_block_type")
    kinds = {kind for part in parts for n in names for kind in getattr(part, n, None) or ()}
    windows = any(getattr(part, name, None) for part in parts for name in _WINDOWS)
    return windows or bool(kinds - {"full_attention"})


def causal_inputs(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Arguments by which a model reads right-padded rows ids int64 [b, L] without a mask.

    Without any, transformers would ask the device whether positions begin again, for which the host
    waits.  A prepared mask (4D) is handed down as it is; `attend` knows this one.
    """
    if ids.device.type == "cpu" or not (has_own_attention(model) and accepts_any_mask(model)):
        return {}
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return {"attention_mask": ids.new_ones(1, 1, 1, 1, dtype=torch.bool), "position_ids": positions}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_segments: tuple[Group, ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Torch's attention, and that of joined rows: states float [b, n, h, d].

    Without ``packed_segments`` it is the function of transformers, but for single tokens on a GPU
    (`grouped_attention`) and under autocast on a CPU, where float32 is faster for few keys.
    """
    if packed_segments is None:
        if attention_mask is not None and attention_mask.shape == (1, 1, 1, 1):
            attention_mask = None  # of `causal_inputs`, or of a single token
        options |= {"scaling": scaling, "dropout": dropout}
        known_mask = attention_mask is None or attention_mask.dtype == torch.bool
        most = 0
        if query.device.type == "cpu" and known_mask and not torch.compiler.is_compiling():
            most = backend().float32_attention()
        if most and (query.shape[2] == 1 or key.shape[2] <= most):
            with torch.autocast("cpu", enabled=False):
                wide = (x.to(torch.float32) for x in (query, key, value))
                result: tuple[Tensor, None] = _GROUPED(module, *wide, attention_mask, **options)
        else:
            result = _GROUPED(module, query, key, value, attention_mask, **options)
        return result
    if dropout or any(options.get(x) is not None for x in OTHER):
        raise ValueError(f"joined rows do not support dropout or {OTHER}")
    return joined_attention(query, key, value, packed_segments, scaling).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(_OWN, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_OWN, ALL_MASK_ATTENTION_FUNCTIONS[_USUAL])
