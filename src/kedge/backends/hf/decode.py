"""Steps a transformers model one token at a time with a key-value cache."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from kedge.backends.hf.mask_checks import known_masks
from kedge.errors import ConfigError

_FREE_SLOTS = 64  # at least, when a layer is allocated


class Stepper(Protocol):
    """A batch of sequences that grow by one token per step."""

    def start(self, ids: Tensor, mask: Tensor, copies: Tensor) -> Tensor:
        """Read prompts ids, mask [u, P] once; row i continues prompt copies[i].  Logits [b, V].

        All three are on the host, the logits on the model's device.
        """
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens int64 [b].  Logits [b, V] of what follows."""
        ...

    def select(self, rows: Tensor) -> Tensor:
        """Keep only the rows int64 [n] of the batch, in that order.

        ``rows`` is on the host; the same on the model's device is returned.
        """
        ...


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer with free slots at the end, so that a step copies one token."""

    keys: Tensor  # [b, heads, used, size]; the first slots of a larger tensor
    values: Tensor
    _slots: tuple[Tensor, Tensor]  # keys and values [b, heads, used + free, size]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values [b, heads, n, size]; returns all."""
        used = self.keys.shape[-2] if self.is_initialized else 0
        new = key_states.shape[-2]
        if not self.is_initialized or used + new > self._slots[0].shape[-2]:
            self._allocate(key_states, value_states, used)
        for slots, states in zip(self._slots, (key_states, value_states), strict=True):
            slots.narrow(-2, used, new).copy_(states)
        self._show(used + new)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows in ``indices``."""
        keys, values = self._slots
        self._slots = keys.index_select(0, indices), values.index_select(0, indices)
        self._show(self.keys.shape[-2])

    def _show(self, used: int) -> None:
        self.keys, self.values = (x.narrow(-2, 0, used) for x in self._slots)

    def _allocate(self, key_states: Tensor, value_states: Tensor, used: int) -> None:
        needed = used + key_states.shape[-2]
        free = max(_FREE_SLOTS, needed // 2)
        keys, values = (
            x.new_empty(*x.shape[:-2], needed + free, x.shape[-1])
            for x in (key_states, value_states)
        )
        if used:
            keys.narrow(-2, 0, used).copy_(self.keys)
            values.narrow(-2, 0, used).copy_(self.values)
        self.dtype, self.device = key_states.dtype, key_states.device
        self._slots = keys, values
        self.is_initialized = True


def growing_cache(config: Any) -> DynamicCache:
    """The cache that ``config`` asks for, with its plain full-attention layers made growing."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(x) is DynamicLayer else x for x in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    return cache


def keep_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Keep only the rows of every layer, also of those that hold a recurrent state."""
    layers: list[Any] = cache.layers
    for layer in layers:
        # Recurrent layers only have the reordering of beam search, which does the same.
        getattr(layer, "batch_select_indices", layer.reorder_cache)(rows)


def get_base_model(model: Any) -> Any:
    """The transformers model inside a PEFT model; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class CausalStepper:
    """Decoder-only models: left-padded prompts, one growing cache."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        config = get_base_model(model).config
        accepted = inspect.signature(get_base_model(model).forward).parameters
        self._cache = growing_cache(config)
        self._options: dict[str, Any] = {"past_key_values": self._cache, "use_cache": True}
        if "logits_to_keep" in accepted:
            self._options["logits_to_keep"] = 1
        self._takes_positions = "position_ids" in accepted
        self._device = next(model.parameters()).device

    @property
    def keeps_all(self) -> bool:
        """Whether every layer keeps all keys and values, and positions can be given."""
        layers = self._cache.layers
        full = all(isinstance(x, GrowingLayer) for x in layers)
        full &= bool(layers) or self._cache.layer_class_to_replicate is GrowingLayer
        return self._takes_positions and full

    def start(self, ids: Tensor, mask: Tensor, copies: Tensor) -> Tensor:
        """Read the prompts once, then repeat their keys and values for each row."""
        # Positions count real tokens, so left padding does not change a row's result.
        positions = (mask.long().cumsum(-1) - 1).clamp_(min=0).to(self._device)
        self._padded = ~mask.all(-1)  # on the host: rows with padding
        self._mask = mask.to(self._device) if self._padded.any() else None
        self._position = positions[:, -1:] + 1
        logits = self._forward(ids.to(self._device), positions)
        self._extend_mask()
        if not torch.equal(copies, torch.arange(len(ids))):
            logits = logits[self.select(copies)]
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """One forward pass over one token per row."""
        logits = self._forward(tokens[:, None], self._position)
        self._position = self._position + 1
        self._extend_mask()
        return logits

    def select(self, rows: Tensor) -> Tensor:
        """Drop the other rows from the cache, the mask and the positions."""
        self._padded, rows = self._padded[rows], rows.to(self._device)
        keep_rows(self._cache, rows)
        self._position = self._position[rows]
        if self._mask is not None:
            self._mask = self._mask[rows] if self._padded.any() else None
        return rows

    def _extend_mask(self) -> None:
        if self._mask is not None:
            self._mask = nn.functional.pad(self._mask, (0, 1), value=True)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self._takes_positions:
            self._options["position_ids"] = positions
        with known_masks():
            out = self._model(input_ids=ids, attention_mask=self._mask, **self._options)
        return out.logits[:, -1]


class EncoderDecoderStepper:
    """Encoder-decoder models: prompt to the encoder, start token to the decoder."""

    def __init__(self, model: nn.Module) -> None:
        self._model = get_base_model(model)
        config = self._model.config
        start = config.decoder_start_token_id
        if start is None:
            raise ConfigError(
                f"the config of {type(self._model).__name__} must set decoder_start_token_id, the "
                "token that responses start from"
            )
        self._start_token: int = start
        self._cache = EncoderDecoderCache(growing_cache(config), DynamicCache(config=config))

    def start(self, ids: Tensor, mask: Tensor, copies: Tensor) -> Tensor:
        """Encode each prompt once, then repeat its state for each row."""
        # Right-padded: the positions of absolute embeddings then count real tokens only.
        real_first = mask.long().argsort(dim=-1, descending=True, stable=True)
        device = next(self._model.parameters()).device
        ids, mask = (x.gather(-1, real_first).to(device) for x in (ids, mask))
        self._encoded = self._model.get_encoder()(input_ids=ids, attention_mask=mask)[0]
        self._mask = mask
        logits = self.step(ids.new_full((len(ids),), self._start_token))
        return logits[self.select(copies)]

    def step(self, tokens: Tensor) -> Tensor:
        """One forward pass of the decoder over one token per row."""
        out = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._encoded),
            attention_mask=self._mask,
            decoder_input_ids=tokens[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        return out.logits[:, -1]

    def select(self, rows: Tensor) -> Tensor:
        """Drop the other rows from both caches and the encoder output."""
        rows = rows.to(self._mask.device)
        self._cache.batch_select_indices(rows)
        self._encoded, self._mask = self._encoded[rows], self._mask[rows]
        return rows


def build_stepper(model: nn.Module) -> Stepper:
    """A new stepper for the model's architecture.

    Raises:
        ConfigError: the embedded engine cannot sample from this kind of model.
    """
    base = get_base_model(model)
    name = type(base).__name__
    if "past_key_values" not in inspect.signature(base.forward).parameters:
        raise ConfigError(
            f"{name} has no key-value cache (past_key_values), which the embedded engine needs"
        )
    adapters: Any = getattr(model, "peft_config", {})
    for adapter, config in adapters.items():
        if config.is_prompt_learning:
            raise ConfigError(
                f"adapter {adapter!r} is of type {config.peft_type}, which prepends virtual "
                "tokens; the embedded engine needs one that changes weights, such as LoRA"
            )
    encodes = getattr(base.config, "is_encoder_decoder", False)
    return EncoderDecoderStepper(model) if encodes else CausalStepper(model)
