"""Steps a transformers model one token at a time: cache, captured step, decoder.

Keys and values have free slots, so that a step copies one token.  Small models sample as fast as
the host can launch kernels: on a GPU a step is captured as a CUDA graph, one launch instead of
thousands.  That needs fixed shapes and addresses: keys and values are written at a cursor on the
device, and attention reads all slots behind a mask.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.utils import logging

from kedge.models.compatibility import cache_argument, positions
from kedge.ops.attention import accepts_any_mask
from kedge.records.errors import ConfigError

_FREE_SLOTS = 64  # minimum allocated per layer
_SPARE = 3  # slots of memory per token, since growing to twice the size copies the layer
logger = logging.get_logger(__name__)
Result = tuple[Tensor, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor], Result]
_failed: set[str] = set()  # model classes whose step cannot be captured
_SCARCE = 1 / 8  # free share of a GPU's memory
capturing = threading.Lock()  # hold to free cached memory, which would break a capture
Draw = Callable[[Tensor], tuple[Tensor, Tensor]]  # logits -> tokens int64 [b], and values to read
_EAGER_STEPS = 4  # steps to run before a capture, which costs about as much


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
        key_states, value_states = map(_cast_for_attention, (key_states, value_states))
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


def can_capture(model: nn.Module, layers: list[Any]) -> bool:
    """Whether the decode step of this model may be captured.

    ``KEDGE_CUDA_GRAPHS=0`` turns graphs off.
    """
    return (
        next(model.parameters()).is_cuda
        and os.environ.get("KEDGE_CUDA_GRAPHS", "1") != "0"
        and all(isinstance(layer, GrowingLayer) for layer in layers)
        and accepts_any_mask(model)
        and type(model).__name__ not in _failed
        and not getattr(model, "is_loaded_in_8bit", False)  # its products make the host wait
        and not any(isinstance(p, DTensor) for p in model.parameters())
    )


class DecodeGraph:
    """A captured step of a batch whose prompts have been read.

    ``mask`` bool [b, used] (None: all True), ``position`` int64 [b, 1] of the next token.
    """

    def __init__(
        self, model: nn.Module, layers: list[GrowingLayer], mask: Tensor | None, position: Tensor
    ) -> None:
        self._name = type(model).__name__
        self._layers = layers
        self._used, self._capacity = layers[0].keys.shape[-2], layers[0].capacity
        rows, device = len(position), position.device
        self._cursor = torch.tensor([self._used], device=device)
        self._position = position.clone()
        self._tokens = position.clone()
        self._mask = torch.zeros(rows, self._capacity, dtype=torch.bool, device=device)
        self._mask[:, : self._used] = True if mask is None else mask[:, : self._used]
        self._graph = torch.cuda.CUDAGraph()
        self._result: Result | None = None

    @property
    def is_full(self) -> bool:
        """Whether no slot is left."""
        return self._used == self._capacity

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """Mask bool [b, used + 1], with the slot of the next token, and its position [b, 1]."""
        seen = self._mask[:, : self._used]
        return nn.functional.pad(seen, (0, 1), value=True), self._position

    def capture(self, tokens: Tensor, forward: Forward) -> bool:
        """Record the step of tokens int64 [b]; False if this model cannot be captured.

        ``forward`` maps input ids int64 [b, 1], positions int64 [b, 1] and a mask bool [b, 1, 1, S]
        to the result of a step, on the device, and appends to the layers.  It is not kept: it may
        hold the owner of this graph, whose memory would then wait for a garbage collection.
        """
        self._tokens.copy_(tokens[:, None])
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with self._fixed_slots(), torch.cuda.stream(side), capturing:
            try:
                free, total = torch.cuda.mem_get_info()
                if free < _SCARCE * total:  # a capture cannot use memory that torch has cached
                    torch.cuda.empty_cache()
                # Warm-up: libraries allocate their buffers, and the step's cache slot is written.
                self._run(forward)
                side.synchronize()
                self._record(forward)
            except torch.OutOfMemoryError as error:  # the next batch may fit
                logger.warning_once(f"a batch is sampled without CUDA graphs: {error}")
            except Exception as error:  # a model's code may raise anything during capture
                _failed.add(self._name)
                reason = str(error).partition("\n")[0]
                logger.warning(f"{self._name} samples without CUDA graphs: {reason}")
        main.wait_stream(side)
        return self._result is not None

    def _record(self, forward: Forward) -> None:
        # Another thread may be training.
        self._graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = self._run(forward)
        except Exception:
            with contextlib.suppress(RuntimeError):
                self._graph.capture_end()
            raise
        self._graph.capture_end()
        self._result = result

    def step(self, tokens: Tensor) -> Result:
        """Append tokens int64 [b].  The result is valid until the next call."""
        assert self._result is not None
        self._tokens.copy_(tokens[:, None])
        self._graph.replay()
        self._cursor += 1
        self._position += 1
        self._used += 1
        return self._result

    def finish(self) -> None:
        """Make the filled slots visible in the cache."""
        for layer in self._layers:
            layer.use_slots(self._used)

    def _run(self, forward: Forward) -> Result:
        self._mask.index_fill_(1, self._cursor, True)
        return forward(self._tokens, self._position, self._mask[:, None, None])

    @contextlib.contextmanager
    def _fixed_slots(self) -> Any:
        for layer in self._layers:
            layer.cursor = self._cursor
        try:
            yield
        finally:
            for layer in self._layers:
                layer.cursor = None


def get_base_model(model: Any) -> Any:
    """The transformers model inside a PEFT model; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values of one row, kept from one turn to the next."""

    tokens: list[int]
    keys: list[Tensor]  # [heads, tokens, size] per layer
    values: list[Tensor]


def common_length(a: list[int], b: list[int]) -> int:
    """Length of the common prefix of two lists."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def pad_left(x: Tensor, size: int, dim: int) -> Tensor:
    """Pad ``dim`` on the left with zeros to ``size``."""
    after = [0] * 2 * (x.ndim - 1 - dim)
    return nn.functional.pad(x, [*after, size - x.shape[dim], 0])


class CausalDecoder:
    """A batch of left-padded sequences that grow by one token per step, with one cache.

    If weights change ``across_updates`` in its lifetime, a CUDA graph casts them in every step.
    """

    def __init__(self, model: nn.Module, *, across_updates: bool = False) -> None:
        self._model, self._across_updates = model, across_updates
        config = get_base_model(model).config
        accepted = inspect.signature(get_base_model(model).forward).parameters
        self._cache = growing_cache(config)
        self._cache_argument = cache_argument(get_base_model(model)) or "past_key_values"
        self._options: dict[str, Any] = {self._cache_argument: self._cache, "use_cache": True}
        if "logits_to_keep" in accepted:
            self._options["logits_to_keep"] = 1
        self._takes_positions = "position_ids" in accepted
        self._any_mask = self._takes_positions and accepts_any_mask(get_base_model(model))
        # finished rows may stay in the batch beyond the model's last position
        self._last = (positions(config) or 2**31) - 1
        self._device = next(model.parameters()).device
        self._graph: DecodeGraph | None = None
        self._eager = 0  # steps run without a graph

    @property
    def keeps_all(self) -> bool:
        """Whether every layer keeps all keys and values, and positions can be given."""
        layers = self._cache.layers
        full = all(isinstance(x, GrowingLayer) for x in layers)
        full &= bool(layers) or self._cache.layer_class_to_replicate is GrowingLayer
        return self._takes_positions and full

    @property
    def keep_share(self) -> float:
        """Share of running rows from which ended rows are dropped.

        Dropping rows copies the cache; of a graph, the step is captured once more.
        """
        return 0.75 if self._graph is None else 0.5

    def start(self, ids: Tensor, mask: Tensor, copies: Tensor) -> Tensor:
        """Read prompts ids, mask [u, P] once; row i continues prompt copies[i].  Logits [b, V].

        All three are on the host, the logits on the model's device.
        """
        # Positions count real tokens only, so left padding does not change a row's result.
        positions = (mask.long().cumsum(-1) - 1).clamp_(min=0).to(self._device)
        self._padded = ~mask.all(-1)  # computed on the host: which rows have padding
        self._mask = mask.to(self._device) if self._padded.any() else None
        self._position = positions[:, -1:] + 1
        logits = self._run(ids.to(self._device), positions, self._mask)
        self._extend_mask()
        if not torch.equal(copies, torch.arange(len(ids))):
            logits = logits[self.select(copies)]
        return logits

    def resume(self, prefixes: list[Prefix], prompts: list[list[int]]) -> Tensor | None:
        """Logits [b, V] after the prompts; only the tokens after the cached prefixes are computed.

        None if a prompt and its prefix have no token in common.
        """
        pairs = list(zip(prefixes, prompts, strict=True))
        lengths = [min(common_length(p.tokens, ids), len(ids) - 1) for p, ids in pairs]
        if not min(lengths):
            return None
        width = max(lengths)
        for layer in range(len(prefixes[0].keys)):
            sides = ([p.keys[layer] for p in prefixes], [p.values[layer] for p in prefixes])
            keys, values = (
                torch.stack(
                    [pad_left(x[:, :n], width, 1) for x, n in zip(of, lengths, strict=True)]
                )
                for of in sides
            )
            self._cache.update(keys, values, layer)
        new = [ids[n:] for ids, n in zip(prompts, lengths, strict=True)]
        longest = max(map(len, new))
        ids = torch.tensor([[0] * (longest - len(x)) + x for x in new])
        ends = torch.tensor([len(x) for x in prompts])
        positions = ends[:, None] - longest + torch.arange(longest)
        begins = torch.tensor(lengths)[:, None]
        read = torch.arange(width) >= width - begins
        self._padded = torch.ones(len(new), dtype=torch.bool)  # between old and new tokens
        self._mask = torch.cat([read, positions >= begins], 1).to(self._device)
        self._position = ends[:, None].to(self._device)
        positions = positions.clamp(min=0).to(self._device)
        logits = self._run(ids.to(self._device), positions, self._mask)
        self._extend_mask()
        return logits

    def prefix(self, row: int, tokens: list[int]) -> Prefix:
        """Cached keys and values of a row for ``tokens``; the token after them has none yet."""
        self._leave_graph()
        layers: list[Any] = self._cache.layers
        used = layers[0].keys.shape[-2]
        real = slice(None) if self._mask is None else self._mask[row, :used]
        return Prefix(
            tokens=tokens,
            keys=[layer.keys[row][:, real].clone() for layer in layers],
            values=[layer.values[row][:, real].clone() for layer in layers],
        )

    def sample(self, tokens: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Append tokens int64 [b]; returns ``draw`` of the next logits [b, V].

        The next call may overwrite the results, and may replay the work of this one: ``draw`` keeps
        no state on the host, and is the same until rows are added or dropped.
        """
        graph = self._ready_graph(tokens, lambda *inputs: draw(self._run_captured(*inputs)))
        if graph is not None:
            return graph.step(tokens)
        logits = self._run(tokens[:, None], self._position, self._mask)
        self._eager += 1
        self._position = (self._position + 1).clamp_(max=self._last)
        self._extend_mask()
        return draw(logits)

    def select(self, rows: Tensor) -> Tensor:
        """Keep only these rows in the cache, the mask and the positions."""
        self._leave_graph()
        self._padded, rows = self._padded[rows], rows.to(self._device)
        layers: list[Any] = self._cache.layers
        for layer in layers:
            # Recurrent layers only offer beam search's reordering, which does the same.
            getattr(layer, "batch_select_indices", layer.reorder_cache)(rows)
        self._position = self._position[rows]
        if self._mask is not None:
            self._mask = self._mask[rows] if self._padded.any() else None
        return rows

    def join(self, other: CausalDecoder) -> None:
        """Add the rows of ``other`` at the end; see ``keeps_all``."""
        self._leave_graph()
        decoders = (self, other)
        masks = [x._whole_mask() for x in decoders]
        # Drop columns before the first real token of any row.
        begins = [int(mask.any(0).long().argmax()) for mask in masks]
        sizes = [mask.shape[1] - begin for mask, begin in zip(masks, begins, strict=True)]
        width = max(sizes)
        self._mask = torch.cat(
            [pad_left(mask[:, b:], width, 1) for mask, b in zip(masks, begins, strict=True)]
        )
        self._padded = torch.cat([torch.ones_like(x._padded) for x in decoders])
        self._position = torch.cat([x._position for x in decoders])
        cache = growing_cache(get_base_model(self._model).config)
        pairs = zip(self._cache.layers, other._cache.layers, strict=True)
        for number, layers in enumerate(pairs):
            keys, values = (
                torch.cat(
                    [
                        pad_left(getattr(layer, name)[:, :, b:], width - 1, 2)
                        for layer, b in zip(layers, begins, strict=True)
                    ]
                )
                for name in ("keys", "values")
            )
            cache.update(keys, values, number)
        self._cache = self._options[self._cache_argument] = cache

    def _whole_mask(self) -> Tensor:
        """Real tokens of the cache and the next one, bool [b, used + 1]."""
        if self._mask is not None:
            return self._mask
        layer: Any = self._cache.layers[0]
        keys: Tensor = layer.keys
        return torch.ones(len(keys), keys.shape[-2] + 1, dtype=torch.bool, device=keys.device)

    def _ready_graph(self, tokens: Tensor, step: Callable[..., Any]) -> DecodeGraph | None:
        """The captured step, created if it pays off; None: run without a graph."""
        if self._graph is not None and self._graph.is_full:
            self._leave_graph()
        layers: list[Any] = self._cache.layers
        if self._graph is None and self._eager >= _EAGER_STEPS:
            model = get_base_model(self._model)
            if self._takes_positions and can_capture(model, layers):
                for layer in layers:
                    if layer.keys.shape[-2] == layer.capacity:
                        layer.grow()
                graph = DecodeGraph(model, layers, self._mask, self._position)
                self._graph = graph if graph.capture(tokens, step) else None
        return self._graph

    def _leave_graph(self) -> None:
        """Continue without the graph, from its current state."""
        if self._graph is None:
            return
        self._graph.finish()
        mask, self._position = self._graph.state
        self._mask = mask if self._padded.any() else None
        self._graph = None

    def _extend_mask(self) -> None:
        if self._mask is not None:
            self._mask = nn.functional.pad(self._mask, (0, 1), value=True)

    def _run_captured(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """The computation that a graph replays."""
        kind = self._device.type
        cached = torch.is_autocast_cache_enabled() and not self._across_updates
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached):
            return self._run(ids, positions.clamp(max=self._last), mask)

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        if self._takes_positions:
            self._options["position_ids"] = positions
        if mask is not None and mask.ndim == 2 and self._any_mask:
            # Of another mask, transformers asks the device whether it has padding: a wait.
            if ids.shape[1] == 1:
                mask = mask[:, None, None]
            elif self._device.type != "cpu":
                slots = torch.arange(mask.shape[1], device=self._device)
                causal = slots <= slots[-ids.shape[1] :, None]
                mask = mask[:, None, None] & causal
        out = self._model(input_ids=ids, attention_mask=mask, **self._options)
        logits: Tensor = out.logits[:, -1]
        return logits


def build_decoder(model: nn.Module, *, across_updates: bool = False) -> CausalDecoder:
    """Build a decoder for a model that the embedded engine can sample from."""
    base = get_base_model(model)
    name = type(base).__name__
    layers = growing_cache(base.config).layers if cache_argument(base) else None
    if layers is None or (layers and not any(isinstance(x, CacheLayerMixin) for x in layers)):
        raise ConfigError(
            f"{name} has no key-value cache (past_key_values), which the embedded engine needs"
        )
    if not getattr(base, "_supports_default_dynamic_cache", lambda: True)():
        raise ConfigError(
            f"transformers {transformers.__version__} gives {name} a special cache class, but "
            "the embedded engine fills a DynamicCache; set rollout_engine='vllm' or, if a newer "
            "transformers samples from the model with a DynamicCache, install that"
        )
    adapters: Any = getattr(model, "peft_config", {})
    for adapter, config in adapters.items():
        if config.is_prompt_learning:
            raise ConfigError(
                f"adapter {adapter!r} is of type {config.peft_type}, which prepends virtual "
                "tokens; the embedded engine needs one that changes weights, such as LoRA"
            )
    if getattr(base.config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder; a decoder-only model is needed")
    return CausalDecoder(model, across_updates=across_updates)
