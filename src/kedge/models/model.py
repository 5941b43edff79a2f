"""Splits causal language models into backbone and head."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from kedge.models.backbone import read_backbone, run_backbone
from kedge.models.packing import JoinedInput, pack
from kedge.ops.linear_logprob import Head
from kedge.records.errors import ConfigError

logger = logging.getLogger(__name__)
_LOW = (torch.bfloat16, torch.float16)
_RATES = ("dropout", "layerdrop", "drop_path")


class LanguageModelParts(Protocol):
    """A language model split into backbone and head, without copies."""

    @property
    def output(self) -> nn.Module:
        """The output layer."""

    def head(self) -> Head:
        """The output head with the weights it has now."""

    def pack(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        ids: Tensor,
        response_mask: Tensor,
        context_start: Tensor | None = None,
    ) -> JoinedInput:
        """Pack left-padded prompts [b, P] and right-padded responses [b, R] for the backbone."""

    def read(self, packed: JoinedInput) -> Tensor:
        """Hidden states float [b, L, H] of packed rows, to be indexed by ``JoinedInput.states``."""


@dataclass(frozen=True, slots=True)
class CausalParts:
    """A causal language model as backbone and head."""

    backbone: nn.Module
    output: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    packs_rows: bool = False

    def head(self) -> Head:
        """The output head with the weights it has now."""
        weight, bias = head_weight(self.output)
        return Head(weight, bias, self.scale, self.softcap)

    def pack(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        ids: Tensor,
        response_mask: Tensor,
        context_start: Tensor | None = None,
    ) -> JoinedInput:
        """Prompt and response joined."""
        rows = prompt_ids, prompt_mask, ids, response_mask
        return pack(*rows, context_start, joined=self.packs_rows)

    def read(self, packed: JoinedInput) -> Tensor:
        """Last hidden states of the backbone."""
        return read_backbone(self.backbone, packed)


def head_weight(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [V, H] and bias [V] of an output layer, with its LoRA adapter if it has one."""
    layer: Any = module
    if hasattr(layer, "original_module"):  # PEFT's modules_to_save
        on = layer.active_adapters and not layer.disable_adapters
        layer = layer.modules_to_save[layer.active_adapters[0]] if on else layer.original_module
    if type(layer) is nn.Linear:
        return layer.weight, layer.bias
    base = getattr(layer, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(layer, "lora_A"):
        raise ConfigError(
            f"the output layer is a {type(layer).__name__}, but log-probabilities are computed from"
            " the weight of a linear layer; leave the output layer out of quantization and of"
            " adapters other than LoRA"
        )
    names = [a for a in layer.active_adapters if a in layer.lora_A]
    special = [a for a in names if a in layer.lora_variant or layer.lora_bias.get(a)]
    if special:
        raise ConfigError(
            f"adapter {special[0]!r} on the output layer must be plain LoRA; leave the output layer"
            " out of target_modules"
        )
    if layer.disable_adapters or layer.merged or not names:
        return base.weight, base.bias
    return base.weight + sum(layer.get_delta_weight(a) for a in names), base.bias


def causal_parts(model: nn.Module, *, verify: bool = True) -> CausalParts:
    """Backbone and head of a causal language model, by default checked on a few tokens.

    Logits must be softcap(scale * head(backbone(x))), with a linear head over a causal backbone.
    """
    inner: Any = model
    if hasattr(model, "peft_config"):
        inner = inner.get_base_model()
    name = type(inner).__name__
    config = getattr(inner, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder; a decoder-only model is needed")
    backbone = get_backbone(inner)
    output = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if backbone is None or output is None:
        raise ConfigError(
            f"{name} is not a causal language model: it lacks a backbone or an output layer"
        )
    silence_mask_warning(backbone)
    scale = getattr(config, "logit_scale", None)  # Cohere
    if scale is None:
        scale = 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    parts = CausalParts(backbone, output, float(scale), None if cap is None else float(cap))
    if verify:
        _verify(model, parts, name)
    return parts


def silence_mask_warning(backbone: Any) -> None:
    """Silence the warning about a missing attention mask: rows are padded at the end only."""
    backbone.warn_if_padding_and_no_attention_mask = lambda *_: None


def get_backbone(model: nn.Module) -> nn.Module | None:
    """The part of a transformers model below its head."""
    prefix = getattr(model, "base_model_prefix", "")
    return getattr(model, prefix, None) if prefix else None


@torch.no_grad()
def _verify(model: nn.Module, parts: CausalParts, name: str) -> None:
    """Compare logits with the model's own, and test that early states ignore later tokens."""
    head = parts.head()
    if head.weight.is_meta:  # rank 0 has the weights
        return
    count = min(16, head.weight.shape[0])
    ids = torch.arange(count, device=head.weight.device)[None]
    with eval_mode(model):
        hidden, ahead = look_ahead(parts.backbone, ids)
        expected = model(input_ids=ids, use_cache=False).logits[0].float()
    if not bool(expected.isfinite().all()):
        raise ConfigError(
            f"{name}: its logits are not finite, on tokens 0 to {count - 1}; its weights hold NaN "
            "or infinite numbers"
        )
    exact = hidden.dtype == torch.float32 and not rounds_activations(model)
    slack = (1e-3 if exact else 5e-2) * float(expected.abs().max() + 1)
    gap = float((head.logits(hidden) - expected).abs().max())
    if not gap <= slack:
        raise ConfigError(
            f"{name}: logits from backbone and head differ from the model's own by {gap:.3g}; it "
            "post-processes logits in a way that is not supported"
        )
    if not ahead <= slack:
        raise ConfigError(f"{name} is not causal: later tokens change earlier states ({ahead:.3g})")


def reached_weights(model: nn.Module, parts: LanguageModelParts) -> list[nn.Parameter]:
    """The trainable weights on which the log-probabilities of a model depend.

    They are read from the graph of a forward pass over a few tokens.
    """
    head = parts.head()
    if head.weight.is_meta:  # rank 0 has the weights
        return [p for p in model.parameters() if p.requires_grad]
    ids = torch.arange(min(16, head.weight.shape[0]))[None]
    real = torch.ones_like(ids, dtype=torch.bool)
    with eval_mode(model), torch.enable_grad():
        hidden = parts.read(parts.pack(ids, real, ids, real).to(head.weight.device))
        nodes: list[Any] = [parts.head().logits(hidden.flatten(0, 1)).grad_fn]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [below for below, _ in node.next_functions]
    leaves = {id(node.variable) for node in seen if hasattr(node, "variable")}
    return [p for p in model.parameters() if p.requires_grad and id(p) in leaves]


def rounds_activations(model: nn.Module) -> bool:
    """Whether the model uses LLM.int8, which rounds columns depending on all tokens of a batch."""
    return bool(getattr(model, "is_loaded_in_8bit", False))


def look_ahead(backbone: nn.Module, ids: Tensor) -> tuple[Tensor, float]:
    """States [T, H] of tokens 0, 1, ..., [1, T], and how much later tokens change the first half.

    Both rows have one length: in bfloat16 a shorter row is rounded differently, which changes
    states of a trained model by up to a third.
    """
    half = ids.shape[1] // 2
    hidden, other = (run_backbone(backbone, row)[0] for row in (ids, ids.where(ids < half, 0)))
    return hidden, float((hidden - other)[:half].abs().max())


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context without dropout; restores the mode of every module."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def no_dropout(model: nn.Module) -> None:
    """Set every dropout rate of a model to zero, for good."""
    for module in model.modules():
        names = [n for n, v in vars(module).items() if isinstance(v, float)]
        names = [name for name in names if any(rate in name for rate in _RATES)]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            names.append("p")
        for name in names:
            if getattr(module, name) > 0:
                setattr(module, name, 0.0)


def checkpoint_activations(model: Any, options: Mapping[str, Any] | None = None) -> None:
    """Recompute activations in the backward instead of keeping them."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not getattr(model, "supports_gradient_checkpointing", False) or not layers:
        raise ConfigError(
            f"gradient_checkpointing=True, but {type(model).__name__} does not support it; "
            "set gradient_checkpointing=False"
        )
    how = dict(options or {"use_reentrant": False})
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def set_training(model: nn.Module, training: bool) -> None:
    """Set evaluation mode, except in layers that checkpoint activations only in train mode."""
    model.eval()
    if training:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True


def in_float32(model: nn.Module, name: str) -> bool:
    """Convert a model whose trained weights are bf16 or fp16 to float32, in place, and log it.

    With an adapter, only the trained weights are converted.  Returns whether any were.
    """
    low = [p for p in model.parameters() if p.requires_grad and p.dtype in _LOW]
    if not low:
        return False
    logger.warning(
        "%s has weights in %s; they train in float32, since a bf16 weight swallows an update"
        " smaller than 1/256 of itself",
        name,
        str(low[0].dtype).removeprefix("torch."),
    )
    if any(hasattr(module, "peft_config") for module in model.modules()):
        for p in low:
            p.data = p.data.float()
    else:
        model.float()
    return True


def check_trainable(named: Iterable[tuple[str, nn.Parameter]], *, allow_low: bool = False) -> None:
    """Refuse weights that train in less than float32."""
    for name, p in named:
        if p.requires_grad and p.dtype not in {torch.float32, torch.float64} and not allow_low:
            raise ConfigError(
                f"{name} trains in {p.dtype}: a bf16 weight swallows an update smaller than 1/256 "
                "of itself. Load the model in float32 and set bf16=True (autocast), or set "
                "allow_low_precision_weights=True"
            )
