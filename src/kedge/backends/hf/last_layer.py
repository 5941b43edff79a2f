"""Computes the feed-forward part of the last layer only where its output is read.

Log-probabilities and values read the states of responses.  In the last layer, tokens of a prompt
matter to them through keys and values alone, so its feed-forward part, most of its arithmetic, is
left out for these tokens: their final states are wrong, but never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kedge.backends.hf.freezing import find_layers
from kedge.backends.hf.packing import Packed
from kedge.ops.cpu.matmul import cpu_kernels_enabled

_WORTH = 0.9  # of the tokens are read at most; otherwise all are computed

_active: ContextVar[Mapping[int, _FeedForward]] = ContextVar("last_layers", default={})  # noqa: B039


@dataclass(slots=True, eq=False)
class _FeedForward:
    """The feed-forward part of one trunk's last layer, and the tokens whose state is read."""

    module: nn.Module
    usual: Callable[..., Any] = field(init=False)
    index: Tensor | None = None  # int64 [n], in [0, tokens)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.usual = self.module.forward

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        """Float [b, L, H] -> [b, L, H], 0 for tokens that are not read."""
        flat = hidden.flatten(0, -2)
        if self.index is None or len(flat) != self.tokens or args or options:
            return self.usual(hidden, *args, **options)
        rows = self.usual(flat.index_select(0, self.index)[None])[0]
        out = rows.new_zeros(len(flat), rows.shape[-1]).index_copy(0, self.index, rows)
        return out.view(*hidden.shape[:-1], -1)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the module computes the tokens of ``index`` alone."""
        own = vars(self.module).get("forward")
        self.module.__dict__["forward"] = self.forward
        try:
            yield
        finally:
            self.index = None
            del self.module.__dict__["forward"]
            if own is not None:
                self.module.__dict__["forward"] = own


def expect_reads(backbone: nn.Module, packed: Packed) -> None:
    """Announce the next pass of a trunk; its layers may be recomputed until another is announced.

    A no-op outside of ``LastLayers.active``.
    """
    part = _active.get().get(id(backbone))
    if part is not None:
        part.tokens = packed.ids.numel()
        few = packed.read is not None and 0 < len(packed.read) <= _WORTH * part.tokens
        part.index = packed.read if few else None


class LastLayers:
    """The last layers of the trunks of a learner; none on accelerators.

    A trunk is left out whose last layer has no feed-forward part named ``mlp``, or gives other
    states on a few tokens.

    Args:
        models: objects with a ``backbone``; those without one are left out.
    """

    def __init__(self, models: Iterable[object]) -> None:
        self._parts: dict[int, _FeedForward] = {}
        backbones = [getattr(model, "backbone", None) for model in models]
        for backbone in backbones if cpu_kernels_enabled() else ():
            found = find_layers(backbone) if isinstance(backbone, nn.Module) else None
            module = getattr(found[1][-1], "mlp", None) if found else None
            if isinstance(module, nn.Module) and isinstance(backbone, nn.Module):
                part = _FeedForward(module)
                if _agrees(backbone, part):
                    self._parts[id(backbone)] = part

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context of forward and backward passes of packed rows that name what is read."""
        token = _active.set(self._parts)
        try:
            with ExitStack() as stack:
                for part in self._parts.values():
                    stack.enter_context(part.active())
                yield
        finally:
            _active.reset(token)


@torch.no_grad()
def _agrees(backbone: Any, part: _FeedForward) -> bool:
    if next(part.module.parameters(), torch.empty(0, device="meta")).device.type != "cpu":
        return False
    ids, index = torch.arange(12).view(2, 6), torch.tensor([2, 5, 9])
    try:
        expected = backbone(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[index]
        with part.active():
            part.index, part.tokens = index, ids.numel()
            states = backbone(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[index]
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False  # it takes or returns something else
    slack = 1e-5 if states.dtype in (torch.float32, torch.float64) else 2e-2
    return bool((states - expected).abs().max() <= slack * (1 + expected.abs().max()))
