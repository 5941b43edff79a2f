"""Replays the decode step of a model as a CUDA graph: one launch per token instead of thousands.

Small models sample as fast as the host can launch kernels.  A captured step needs fixed shapes and
addresses: keys and values are written at a cursor on the device, and attention reads all slots
behind a mask.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from kedge.rollout.embedded.kv_cache import GrowingLayer

Result = tuple[Tensor, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor], Result]
logger = logging.get_logger(__name__)
_failed: set[str] = set()  # model classes whose step cannot be captured
_SCARCE = 1 / 8  # free share of a GPU's memory
capturing = threading.Lock()  # hold to free cached memory, which would break a capture


def can_capture(model: nn.Module, layers: list[Any]) -> bool:
    """Whether the decode step of this model may be captured.

    ``KEDGE_CUDA_GRAPHS=0`` turns graphs off.
    """
    config: Any = getattr(model, "config", None)
    return (
        next(model.parameters()).is_cuda
        and os.environ.get("KEDGE_CUDA_GRAPHS", "1") != "0"
        and all(isinstance(layer, GrowingLayer) for layer in layers)
        and getattr(config, "_attn_implementation", None) == "sdpa"  # it accepts masks of any shape
        and type(model).__name__ not in _failed
        and not getattr(model, "is_loaded_in_8bit", False)  # its products make the host wait
        and not any(isinstance(p, DTensor) for p in model.parameters())
    )


def _free_cached_memory() -> None:
    """Return cached memory if the GPU is nearly full.

    A capture can use neither memory that torch has cached nor that of earlier captures.
    """
    free, total = torch.cuda.mem_get_info()
    if free < _SCARCE * total:
        torch.cuda.empty_cache()


class DecodeGraph:
    """A captured step of a batch whose prompts have been read.

    Args:
        model: name of the model, for messages.
        layers: layers of the cache.
        mask: bool [b, used]; None: all True.
        position: int64 [b, 1]; position of the next token.
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
                _free_cached_memory()
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
