"""Description of a policy for a rollout engine: everything but the trained weights."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.modeling_layers import GradientCheckpointingLayer

from kedge.ext.vllm.weights import WeightPayload, adapter_weights, base_weights, get_lora_config
from kedge.models.fingerprint import as_copy, check_weights, fingerprint
from kedge.models.peft import drop_adapters
from kedge.records.errors import ConfigError, SyncError

_PROBE_ROWS, _PROBE_TOKENS = 4, 32
_MODEL_LOCK = threading.Lock()  # engines share a module and swap weights into it
_EXPECTED_LOCK = threading.Lock()  # the first engine of a weight sync computes, others wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Fingerprint and probe log-probabilities that sent weights must reproduce."""

    fingerprint: str
    logprobs: Tensor  # for the probe: float32 [rows, tokens - 1], nats
    rounded: Tensor  # the same, in the rollout engine's dtype


@dataclass(frozen=True, slots=True)
class PolicyTemplate:
    """A policy without its trained weights; can be pickled and sent to other processes.

    Args:
        meta_model: the policy with trained weights on the meta device and frozen weights shared.
        tied: names of the weights of output head and embedding, if they are one tensor.
        adapter: LoRA configuration, if only an adapter is trained.
        tokenizer: the policy's tokenizer, or None; only needed for stop strings.
        dtype: the rollout engine's dtype, in which weights are sent; None: unchanged.
    """

    meta_model: nn.Module
    tied: tuple[str, str] | None
    tokenizer: Any = None
    adapter: Any = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(
        cls, policy: nn.Module, tokenizer: Any = None, *, dtype: torch.dtype | str | None = None
    ) -> PolicyTemplate:
        """Build a template from a causal language model; ``dtype`` may be vLLM's name."""
        config: Any = policy.config
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{type(policy).__name__} is an encoder-decoder model, which vLLM engines do not"
                " support; use rollout_engine='embedded'"
            )
        adapter = get_lora_config(policy)
        model: Any = policy
        base = policy if adapter is None else model.get_base_model()
        if isinstance(dtype, str):  # "auto" is not a dtype
            dtype = getattr(torch, dtype.removeprefix("torch."), None)
        return cls(meta_model(policy), _tied(base), tokenizer, adapter, dtype)

    def on_cpu(self) -> PolicyTemplate:
        """The template with frozen weights on the CPU, to be sent to another process."""
        return replace(self, meta_model=on_cpu(self.meta_model))

    @property
    def base(self) -> nn.Module:
        """The model without its adapter."""
        wrapped: Any = self.meta_model
        return wrapped.get_base_model() if self.adapter is not None else self.meta_model

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        config: Any = self.meta_model.config
        return int(config.get_text_config().vocab_size)

    @property
    def config(self) -> Any:
        """The model's configuration for vLLM.

        A tied head becomes a separate weight, since vLLM does not update a tied one when weights
        are reloaded.  There is no EOS token, since vLLM would ban it during ``min_new_tokens`` even
        if it is not a stop token.
        """
        config: Any = copy.deepcopy(self.base.config)
        config.architectures = [type(self.base).__name__]
        config.eos_token_id = None
        if self.tied is not None:
            config.tie_word_embeddings = False
        return config

    def payload(self, weights: Mapping[str, Tensor]) -> WeightPayload:
        """The trained weights, ready to be sent."""
        parameters = dict(self.meta_model.named_parameters())
        check_weights(parameters, weights)
        missing = [name for name, p in parameters.items() if p.is_meta and name not in weights]
        if missing:
            raise SyncError(f"trained weight {missing[0]!r} is missing; send all trained weights")
        if self.adapter is not None:
            return WeightPayload(adapter_weights(weights), self.adapter, weights=weights)
        whole = self._with_head(parameters | dict(weights))
        return WeightPayload(tuple(whole), dtype=self.dtype, weights=weights)

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a folder that vLLM can load: configuration, weights without adapter, tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        if self.tokenizer is not None:
            tokenizer = copy.deepcopy(self.tokenizer)
            tokenizer.eos_token = None
            tokenizer.save_pretrained(folder)
        if self.adapter is None:
            self.payload(weights).write(folder)
        else:
            frozen = base_weights(dict(self.meta_model.named_parameters()))
            WeightPayload(tuple(self._with_head(frozen)), dtype=self.dtype).write(folder)

    def _with_head(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, and a tied head under its separate name."""
        for name, x in weights.items():
            yield name, x.detach()
            if self.tied is not None and name == self.tied[1]:
                yield self.tied[0], x.detach()

    def probe(self) -> Tensor:
        """Fixed token ids int64 [rows, tokens] on which weight syncs are verified."""
        model_config: Any = self.meta_model.config
        config = model_config.get_text_config()
        context = getattr(config, "max_position_embeddings", None) or _PROBE_TOKENS
        size = (_PROBE_ROWS, min(_PROBE_TOKENS, context - 1))
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, config.vocab_size, size, generator=generator)

    def expected(self, weights: Mapping[str, Tensor]) -> Expected:
        """The values that a rollout engine must report; computed once for all engines."""
        weights = as_copy(weights)
        with _EXPECTED_LOCK:
            model, found = weights.expected or (None, None)
            if found is None or model is not self.meta_model:
                exact = self.logprobs(weights)
                low = self.dtype is not None and self.dtype != torch.float32
                rounded = self.logprobs(weights, autocast=self.dtype) if low else exact
                # Copies hash the weights before rounding.
                digest = weights.fingerprint or fingerprint(weights)
                found = Expected(fingerprint=digest, logprobs=exact, rounded=rounded)
                weights.expected = self.meta_model, found
            return found

    @torch.no_grad()
    def logprobs(
        self, weights: Mapping[str, Tensor], *, autocast: torch.dtype | None = None
    ) -> Tensor:
        """Log-probabilities of the probe by the learner's code: float32 [rows, tokens - 1]."""
        device = as_copy(weights).device or next(iter(weights.values())).device
        ids = self.probe().to(device)
        frozen = {n: p for n, p in self.meta_model.named_parameters() if not p.is_meta}
        parameters = {n: p.to(device) for n, p in frozen.items()} | dict(weights)
        sent = dict.fromkeys(weights, None if self.adapter is not None else self.dtype)
        # Autocast's cache would hold a copy of all weights.
        mixed = torch.autocast(
            device.type, autocast, enabled=autocast is not None, cache_enabled=False
        )
        with _MODEL_LOCK, mixed, _converting_layers(self.meta_model, parameters, device, sent):
            logits = functional_call(self.meta_model, parameters, kwargs={"input_ids": ids}).logits
        picked = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
        return picked[..., 0].cpu()


@contextlib.contextmanager
def _converting_layers(
    model: nn.Module,
    weights: dict[str, Tensor],
    device: torch.device,
    sent: Mapping[str, torch.dtype | None],
) -> Iterator[None]:
    """Context that rounds weights as they are ``sent``, and computes with them on ``device``.

    A layer's weights are converted while it runs, so that no wide copy of the model exists, nor a
    copy on the device; weights outside of layers are converted here.  ``weights`` is empty after
    it.
    """
    kinds = {name: (sent.get(name), p.dtype) for name, p in model.named_parameters()}

    def convert(name: str) -> Tensor:
        x, (narrow, wide) = weights[name], kinds[name]
        return x.to(device, narrow if x.is_floating_point() else None).to(wide)

    layers = {n: x for n, x in model.named_modules() if isinstance(x, GradientCheckpointingLayer)}
    inside = tuple(f"{prefix}." for prefix in layers)
    weights |= {name: convert(name) for name in weights if not name.startswith(inside)}
    with contextlib.ExitStack() as hooks:
        for prefix, layer in layers.items():
            empty = dict(layer.named_parameters())

            def fill(layer: nn.Module, _: Any, prefix: str = prefix, empty: Any = empty) -> None:
                _set(layer, {name: convert(f"{prefix}.{name}") for name in empty})

            def drop(layer: nn.Module, *_: Any, empty: Any = empty) -> None:
                _set(layer, empty)

            hooks.enter_context(layer.register_forward_pre_hook(fill))
            hooks.enter_context(layer.register_forward_hook(drop, always_call=True))
        try:
            yield
        finally:
            weights.clear()  # the functions above form reference cycles with it


def _set(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace parameters of a module, by name."""
    for name, x in weights.items():
        owner, _, last = name.rpartition(".")
        p = x if isinstance(x, nn.Parameter) else nn.Parameter(x, requires_grad=False)
        setattr(module.get_submodule(owner), last, p)


def weights_dtype(policy: nn.Module) -> torch.dtype:
    """The dtype of most of a policy's weights; under adapters, that of the base model."""
    model: Any = policy
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype


def meta_model(policy: nn.Module) -> nn.Module:
    """A copy that shares frozen weights and has trained weights on the meta device."""
    trained = [p for p in policy.parameters() if p.requires_grad] or list(policy.parameters())
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in policy.parameters()
    }
    for p in trained:
        empty = torch.empty_like(p, device="meta")
        memo[id(p)] = nn.Parameter(empty, requires_grad=False)
    return drop_adapters(copy.deepcopy(policy, memo)).eval()


def on_cpu(meta_model: nn.Module) -> nn.Module:
    """A copy of a meta model with frozen weights on the CPU."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().cpu(), requires_grad=False)
        for p in meta_model.parameters()
        if not p.is_meta
    }
    return copy.deepcopy(meta_model, memo)


def _tied(policy: nn.Module) -> tuple[str, str] | None:
    """Names of the weights of output head and embedding, if they are one tensor."""
    model: Any = policy
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    names = {id(module): name for name, module in policy.named_modules()}
    return f"{names[id(head)]}.weight", f"{names[id(embedding)]}.weight"
