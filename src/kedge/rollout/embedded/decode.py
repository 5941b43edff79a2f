"""Steps a transformers model one token at a time with a key-value cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kedge.errors import ConfigError
from kedge.models.compatibility import cache_argument, positions
from kedge.models.mask_checks import known_masks
from kedge.rollout.embedded.decode_graph import DecodeGraph, can_capture
from kedge.rollout.embedded.kv_cache import GrowingLayer, growing_cache

Draw = Callable[[Tensor], tuple[Tensor, Tensor]]  # logits -> tokens int64 [b], and values to read
_EAGER_STEPS = 4  # steps to run before a capture, which costs about as much


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

    Args:
        model: a decoder-only model.
        across_updates: whether weights change in its lifetime, so that a CUDA graph casts them in
            every step.
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
        with known_masks():
            out = self._model(input_ids=ids, attention_mask=mask, **self._options)
        logits: Tensor = out.logits[:, -1]
        return logits


def build_decoder(model: nn.Module, *, across_updates: bool = False) -> CausalDecoder:
    """Build a decoder for a model that the embedded engine can sample from.

    Raises:
        ConfigError: the embedded engine cannot sample from this kind of model.
    """
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
