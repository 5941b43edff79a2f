"""Steps a transformers model one token at a time with a key-value cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

from kedge.errors import ConfigError
from kedge.models.compatibility import positions
from kedge.models.mask_checks import known_masks
from kedge.rollout.embedded.decode_graph import DecodeGraph, can_capture
from kedge.rollout.embedded.kv_cache import GrowingLayer, growing_cache, keep_rows

Draw = Callable[[Tensor], tuple[Tensor, Tensor]]  # tokens int64 [b] from logits, and what is read
_EAGER_STEPS = 4  # before a step is captured, which takes as long as about four


class Stepper(Protocol):
    """A batch of sequences that grow by one token per step."""

    @property
    def keep_share(self) -> float:
        """Ended rows stay in the batch until at most this share is left: dropping has a price."""
        ...

    def start(self, ids: Tensor, mask: Tensor, copies: Tensor) -> Tensor:
        """Read prompts ids, mask [u, P] once; row i continues prompt copies[i].  Logits [b, V].

        All three are on the host, the logits on the model's device.
        """
        ...

    def sample(self, tokens: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Append tokens int64 [b]; ``draw`` of the logits [b, V] of what follows.

        The next call may overwrite the results, and may replay the work of this one: ``draw`` keeps
        no state on the host, and is the same until ``select`` is called.
        """
        ...

    def select(self, rows: Tensor) -> Tensor:
        """Keep only the rows int64 [n] of the batch, in that order.

        ``rows`` is on the host; the same on the model's device is returned.
        """
        ...


def get_base_model(model: Any) -> Any:
    """The transformers model inside a PEFT model; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class CausalStepper:
    """Decoder-only models: left-padded prompts, one growing cache.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        config = get_base_model(model).config
        accepted = inspect.signature(get_base_model(model).forward).parameters
        self._cache = growing_cache(config)
        self._options: dict[str, Any] = {"past_key_values": self._cache, "use_cache": True}
        if "logits_to_keep" in accepted:
            self._options["logits_to_keep"] = 1
        self._takes_positions = "position_ids" in accepted
        # rows that have ended may stay in the batch beyond the last position of the model
        self._last = (positions(config) or 2**31) - 1
        self._device = next(model.parameters()).device
        self._graph: DecodeGraph[Any] | None = None
        self._eager = 0  # steps without a graph

    @property
    def keeps_all(self) -> bool:
        """Whether every layer keeps all keys and values, and positions can be given."""
        layers = self._cache.layers
        full = all(isinstance(x, GrowingLayer) for x in layers)
        full &= bool(layers) or self._cache.layer_class_to_replicate is GrowingLayer
        return self._takes_positions and full

    @property
    def keep_share(self) -> float:
        """Dropping rows copies the cache; of a graph, the step is captured once more."""
        return 0.75 if self._graph is None else 0.5

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
        """Append tokens int64 [b].  Logits [b, V] of what follows."""
        graph = self._ready_graph(tokens, self._captured)
        return self._step(tokens) if graph is None else graph.step(tokens)

    def sample(self, tokens: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """One forward pass over one token per row, and the next tokens."""
        graph = self._ready_graph(tokens, lambda *inputs: draw(self._captured(*inputs)))
        return draw(self._step(tokens)) if graph is None else graph.step(tokens)

    def _step(self, tokens: Tensor) -> Tensor:
        """A step without a graph."""
        inputs = tokens[:, None], self._position, self._mask
        logits = self._run(*inputs)
        self._eager += 1
        self._position = (self._position + 1).clamp_(max=self._last)
        self._extend_mask()
        return logits

    def select(self, rows: Tensor) -> Tensor:
        """Drop the other rows from the cache, the mask and the positions."""
        self._leave_graph()
        self._padded, rows = self._padded[rows], rows.to(self._device)
        keep_rows(self._cache, rows)
        self._position = self._position[rows]
        if self._mask is not None:
            self._mask = self._mask[rows] if self._padded.any() else None
        return rows

    def _ready_graph(self, tokens: Tensor, step: Callable[..., Any]) -> DecodeGraph[Any] | None:
        """The captured step, made if it is worth it; None: step without."""
        if self._graph is not None and self._graph.is_full:
            self._leave_graph()
        layers: list[Any] = self._cache.layers
        if self._graph is None and self._eager >= _EAGER_STEPS:
            model = get_base_model(self._model)
            if self._takes_positions and can_capture(model, layers):
                for layer in layers:
                    if layer.keys.shape[-2] == layer.capacity:
                        layer.grow()
                graph: DecodeGraph[Any]
                graph = DecodeGraph(model, layers, self._mask, self._position)
                self._graph = graph if graph.capture(tokens, step) else None
        return self._graph

    def _leave_graph(self) -> None:
        """Go on without a graph, from the state that it has reached."""
        if self._graph is None:
            return
        self._graph.finish()
        mask, self._position = self._graph.state
        self._mask = mask if self._padded.any() else None
        self._graph = None

    def _extend_mask(self) -> None:
        if self._mask is not None:
            self._mask = nn.functional.pad(self._mask, (0, 1), value=True)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._run(ids, positions, self._mask)

    def _captured(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """What a graph replays."""
        return self._run(ids, positions.clamp(max=self._last), mask)

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        if self._takes_positions:
            self._options["position_ids"] = positions
        with known_masks():
            out = self._model(input_ids=ids, attention_mask=mask, **self._options)
        logits: Tensor = out.logits[:, -1]
        return logits


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
    return CausalStepper(model)
