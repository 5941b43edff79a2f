"""Backbones of language models, with the states below the trained layers computed once per batch.

Where the lower layers are frozen (``train_layers``, LoRA on the top layers), the states that enter
the lowest trained layer depend only on the tokens of a row.  They are kept until the iteration
ends; policy, reference, value model and all epochs start from them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from kedge.models.freezing import find_final_norms, find_layers, layer_number
from kedge.models.joined_rows import run_packed
from kedge.models.mask_checks import known_masks
from kedge.models.packing import JoinedInput
from kedge.ops.cpu.joined_attention import Group

logger = logging.getLogger(__name__)

MEMORY_SHARE = 1 / 8  # share of the device's memory; rows beyond it are recomputed

_active: ContextVar[Mapping[int, _CachedBackbone]] = ContextVar("cached", default={})  # noqa: B039


def run_backbone(backbone: nn.Module, ids: Tensor, groups: Sequence[Group] | None = None) -> Tensor:
    """Last hidden states float [b, L, H] of right-padded rows, without an attention mask.

    With ``groups`` the rows are joined (see ``run_packed``): ids [1, T], states [1, T, H].
    """
    if groups is not None:
        return run_packed(backbone, ids, groups)
    with known_masks():
        return backbone(input_ids=ids, use_cache=False).last_hidden_state


def read_backbone(backbone: nn.Module, packed: JoinedInput) -> Tensor:
    """Call ``run_backbone`` on packed rows; within ``BackboneCache.active``, use cached states."""
    cached = _active.get().get(id(backbone))
    if cached is None or any(p.requires_grad for p in cached.below.weights.values()):
        return run_backbone(backbone, packed.ids, packed.groups)
    return cached.read(packed)


@dataclass(slots=True, eq=False)
class _LowerStates:
    """Cached states after the frozen layers, by row, for all backbones that share these layers."""

    kind: type[nn.Module]
    depth: int  # number of frozen layers
    weights: dict[str, nn.Parameter]  # frozen weights by name
    returns_tuple: bool = False  # whether layers return tuples
    rows: dict[bytes, Tensor] = field(default_factory=dict)  # tokens -> float [length, H]
    size: int = 0  # bytes of ``rows``
    full: bool = False

    def serve(self, backbone: nn.Module, depth: int) -> bool:
        """Whether another backbone has the same ``depth`` frozen layers."""
        theirs = dict(backbone.named_parameters(remove_duplicate=False))
        alike = type(backbone) is self.kind and depth >= self.depth
        return alike and all(theirs.get(name) is p for name, p in self.weights.items())

    def find(self, keys: list[bytes], packed: JoinedInput) -> Tensor | None:
        """States [b, L, H] ([1, T, H] of joined rows) with 0 on padding; None if one is missing."""
        if not all(key in self.rows for key in keys):
            return None
        first = self.rows[keys[0]]
        flat = first.new_zeros(packed.ids.numel(), first.shape[-1])
        for key, index in zip(keys, packed.row_tokens(), strict=True):
            flat[index] = self.rows[key]
        return flat.view(*packed.ids.shape, -1)

    def store(self, keys: list[bytes], packed: JoinedInput, output: Any) -> None:
        """Store outputs of the last frozen layer as long as memory allows."""
        self.returns_tuple = isinstance(output, tuple)
        states = (output[0] if self.returns_tuple else output).detach()
        limit = _budget(states.device)
        for key, index in zip(keys, packed.row_tokens(), strict=True):
            row = states.flatten(0, 1)[index]
            if self.size + row.nbytes <= limit:
                self.size += 0 if key in self.rows else row.nbytes
                self.rows[key] = row
            elif not self.full:
                self.full = True
                logger.warning(
                    "the states below the trained layers of an iteration take more than %.1f GiB,"
                    " an eighth of the memory: those of other rows are recomputed when needed",
                    limit / 2**30,
                )

    def clear(self) -> None:
        """Drop all rows."""
        self.rows.clear()
        self.size = 0


@dataclass(frozen=True, slots=True)
class _CachedBackbone:
    """A backbone that starts from cached states after its frozen layers."""

    backbone: nn.Module
    layers: nn.ModuleList
    below: _LowerStates

    def read(self, packed: JoinedInput) -> Tensor:
        """Last hidden states float [b, L, H]; [1, T, H] of joined rows."""
        keys, frozen = packed.row_keys(), self.layers[: self.below.depth]
        states = self.below.find(keys, packed)
        if states is None:
            hook = frozen[-1].register_forward_hook(
                lambda _, __, output: self.below.store(keys, packed, output)
            )
            try:
                return run_backbone(self.backbone, packed.ids, packed.groups)
            finally:
                hook.remove()
        result = (states,) if self.below.returns_tuple else states
        skipped = [(x, vars(x).get("forward")) for x in frozen]
        # The model computes masks and position embeddings; its input embedding is unused.
        for layer, _ in skipped:
            layer.__dict__["forward"] = lambda *_, **__: result
        try:
            return run_backbone(self.backbone, packed.ids, packed.groups)
        finally:
            for layer, forward in skipped:
                del layer.__dict__["forward"]
                layer.__dict__.update({} if forward is None else {"forward": forward})

    @torch.no_grad()
    def agrees(self) -> bool:
        """Whether the upper layers read nothing but the kept states; tried on a few tokens."""
        modules = self.backbone.modules()
        tokens = next(m.num_embeddings for m in modules if isinstance(m, nn.Embedding))
        lengths = torch.tensor([8, 8])
        ids = (torch.arange(16) % tokens).view(2, 8)
        packed = JoinedInput(ids=ids, lengths=lengths, prompt_lengths=lengths)
        packed = packed.to(next(self.backbone.parameters()).device)
        try:
            whole = self.read(packed)
            # Other rows overwrite any state that the model caches itself.
            run_backbone(self.backbone, packed.ids.flip(1))
            gap = float((self.read(packed) - whole).abs().max())
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
            return False  # the layers return something else
        finally:
            self.below.clear()
        slack = 1e-5 if whole.dtype in (torch.float32, torch.float64) else 2e-2
        return gap <= slack * float(whole.abs().max())


class BackboneCache:
    """Keeps the states below the trained layers of all models of a learner.

    A model is left out if no lower layer is frozen, or if its upper layers read more than
    these states.

    Args:
        models: objects with a ``backbone``, trained ones first; those without one are left out.
    """

    def __init__(self, models: Iterable[object]) -> None:
        self._below: list[_LowerStates] = []
        self._cached: dict[int, _CachedBackbone] = {}
        for model in models:
            backbone = getattr(model, "backbone", None)
            if isinstance(backbone, nn.Module) and id(backbone) not in self._cached:
                self._add(backbone)

    def _add(self, backbone: nn.Module) -> None:
        named_layers, name = find_layers(backbone), type(backbone).__name__
        if named_layers is None or next(backbone.parameters()).is_meta:
            return
        prefix, layers = named_layers
        depth = _count_frozen(backbone, prefix, len(layers))
        below = next((x for x in self._below if x.serve(backbone, depth)), None)
        if below is None:
            named = dict(backbone.named_parameters(remove_duplicate=False))
            if not depth or not any(p.requires_grad for p in named.values()):
                return  # with other weights, a reference reads each row once
            layer = {name: layer_number(name, prefix) for name in named}
            frozen = {n: p for n, p in named.items() if not p.requires_grad}
            weights = {n: p for n, p in frozen.items() if (layer[n] or 0) < depth}
            below = _LowerStates(type(backbone), depth, weights)
        cached = _CachedBackbone(backbone, layers, below)
        if not cached.agrees():
            logger.warning(
                "%s: the states below its trained layers are computed in every pass, since they"
                " cannot be cached: its upper layers read more than these states",
                name,
            )
            return
        self._cached[id(backbone)] = cached
        if below not in self._below:
            self._below.append(below)
            logger.info(
                "%s: %d of %d layers are frozen and computed once per batch",
                *(name, depth, len(layers)),
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which ``read_backbone`` stores states and starts from them."""
        token = _active.set(self._cached)
        try:
            yield
        finally:
            _active.reset(token)

    @property
    def skipped(self) -> set[int]:
        """Ids of weights that a pass from cached states does not read."""
        return {id(p) for below in self._below for p in below.weights.values()}

    def clear(self) -> None:
        """Drop all states."""
        for below in self._below:
            below.clear()


def _count_frozen(backbone: nn.Module, prefix: str, layers: int) -> int:
    """Number of layers below the first that trains or has an adapter; 0 if unsure."""
    after, named = find_final_norms(backbone, prefix), backbone.named_parameters()
    changed = [name for name, p in named if p.requires_grad and not name.startswith(after)]
    changed += [name for name, m in backbone.named_modules() if hasattr(m, "_active_adapter")]
    numbers = [layer_number(name, prefix) for name in changed]
    return min([0 if number is None else number for number in numbers] + [layers - 1])


@cache
def _budget(device: torch.device) -> float:
    """Bytes of states to keep on a device."""
    if device.type == "cuda":
        return MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    return MEMORY_SHARE * psutil.virtual_memory().total
