"""Key-value caches with free slots, so that a step copies one token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_FREE_SLOTS = 64  # minimum allocated per layer
_SPARE = 3  # slots of memory per token, since growing to twice the size copies the layer


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer with free slots at the end, so that a step copies one token."""

    keys: Tensor  # [b, heads, used, size]; the first slots of a larger tensor
    values: Tensor
    cursor: Tensor | None = None  # int64 [1]; if set, write at it and return all slots
    _slots: tuple[Tensor, Tensor]  # keys and values [b, heads, used + free, size]

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self._slots[0].shape[-2]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values [b, heads, n, size]; returns all."""
        key_states, value_states = (
            _cast_for_attention(key_states),
            _cast_for_attention(value_states),
        )
        if self.cursor is not None:
            for slots, states in zip(self._slots, (key_states, value_states), strict=True):
                slots.index_copy_(-2, self.cursor, states)
            return self._slots
        used = self.keys.shape[-2] if self.is_initialized else 0
        count = key_states.shape[-2]
        if not self.is_initialized or used + count > self.capacity:
            needed = used + count
            self._allocate(key_states, value_states, used, needed + max(_FREE_SLOTS, needed // 2))
        for slots, states in zip(self._slots, (key_states, value_states), strict=True):
            slots.narrow(-2, used, count).copy_(states)
        self.use_slots(used + count)
        return self.keys, self.values

    def grow(self) -> None:
        """Make room for as many tokens as there are, at least 64."""
        used = self.keys.shape[-2]
        self._allocate(self.keys, self.values, used, used + max(_FREE_SLOTS, used))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows in ``indices``."""
        keys, values = self._slots
        self._slots = keys.index_select(0, indices), values.index_select(0, indices)
        self.use_slots(self.keys.shape[-2])

    def use_slots(self, used: int) -> None:
        """Set ``keys`` and ``values`` to the first ``used`` slots."""
        self.keys, self.values = (x.narrow(-2, 0, used) for x in self._slots)

    def _allocate(self, key_states: Tensor, value_states: Tensor, used: int, slots: int) -> None:
        slots = -(-slots // 8) * 8  # attention kernels need multiples of 8
        # Slots allocated during a replayed step are also written outside it.
        with torch.inference_mode(False), torch.no_grad():
            keys, values = (
                x.new_empty(*x.shape[:-2], slots, x.shape[-1]) for x in (key_states, value_states)
            )
            for new, old in ((keys, self.keys), (values, self.values)) if used else ():
                new.narrow(-2, 0, used).copy_(old)
            for x in (keys, values):
                x.narrow(-2, used, slots - used).zero_()  # NaN would count even behind a mask
        self.dtype, self.device = key_states.dtype, key_states.device
        self._slots = keys, values
        self.is_initialized = True


def _cast_for_attention(states: Tensor) -> Tensor:
    """Cast states to the dtype of a GPU's attention under autocast.

    Keys are float32 after the rotary embedding; attention would cast all of them for every token.
    """
    device = states.device.type
    if device == "cpu" or states.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return states
    return states.to(torch.get_autocast_dtype(device))


def growing_cache(config: Any) -> DynamicCache:
    """The cache for ``config``, with growing layers for plain full attention."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(x) is DynamicLayer else x for x in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    return cache


def rows_that_fit(config: Any, tokens: int, width: int, device: torch.device) -> int:
    """Number of rows of ``tokens`` tokens whose cache and logits fill half of a GPU's free memory.

    Keys and values take ``width`` bytes per number.
    """
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    text = config.get_text_config()
    logits = 16 * text.vocab_size  # logits and probabilities, float32
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    token_bytes = text.num_hidden_layers * 2 * heads * size * width
    return int(free / 2 / (_SPARE * tokens * token_bytes + logits))
