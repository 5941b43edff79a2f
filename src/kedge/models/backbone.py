"""Backbones of language models, with the states below the trained layers computed once per batch.

Where the lower layers are frozen (``train_layers``, LoRA on the top layers), the states that enter
the lowest trained layer depend on the tokens of a row alone.  They are kept until the iteration
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

from kedge.models.freezing import find_layers, layer_number
from kedge.models.joined_rows import run_joined
from kedge.models.mask_checks import known_masks
from kedge.models.packing import Packed
from kedge.ops.cpu.joined_attention import Group

logger = logging.getLogger(__name__)

MEMORY_SHARE = 1 / 8  # of the device's memory; rows beyond it are computed again

_active: ContextVar[Mapping[int, _CachedBackbone]] = ContextVar("cached", default={})  # noqa: B039


def run_backbone(backbone: nn.Module, ids: Tensor, groups: Sequence[Group] | None = None) -> Tensor:
    """Last hidden states float [b, L, H] of right-padded rows, without an attention mask.

    With ``groups`` the rows are joined (see ``run_joined``): ids [1, T], states [1, T, H].
    """
    if groups is not None:
        return run_joined(backbone, ids, groups)
    with known_masks():
        return backbone(input_ids=ids, use_cache=False).last_hidden_state


def read_backbone(backbone: nn.Module, packed: Packed) -> Tensor:
    """``run_backbone`` of packed rows; within ``BackboneCache.active`` it uses kept states."""
    cached = _active.get().get(id(backbone))
    if cached is None or any(p.requires_grad for p in cached.below.weights.values()):
        return run_backbone(backbone, packed.ids, packed.groups)
    return cached.read(packed)


class _StopForward(Exception):
    """Ends a forward pass; carries the states that have been reached."""


@dataclass(slots=True, eq=False)
class _FrozenLayers:
    """The frozen layers at the bottom of a backbone, and the states after them by row."""

    backbone: nn.Module
    layers: nn.ModuleList  # of the whole backbone
    depth: int  # of them are frozen
    weights: dict[str, nn.Parameter]
    returns_tuple: bool = False  # each layer does
    rows: dict[bytes, Tensor] = field(default_factory=dict)  # tokens -> float [length, H]
    size: int = 0  # bytes of ``rows``
    full: bool = False

    def run(self, packed: Packed) -> Tensor:
        """The states [b, L, H] after the frozen layers; [1, T, H] of joined rows."""

        def see(_: nn.Module, __: Any, output: Any) -> None:
            self.returns_tuple = isinstance(output, tuple)

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _StopForward(args[0] if args else kwargs["hidden_states"])

        first = self.layers[0].register_forward_hook(see)
        last = self.layers[self.depth].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            run_backbone(self.backbone, packed.ids, packed.groups)
        except _StopForward as stopped:
            states: Tensor = stopped.args[0]
            return states
        finally:
            first.remove()
            last.remove()
        raise RuntimeError("its layers do not run one after another")

    @torch.no_grad()
    def states(self, packed: Packed) -> Tensor:
        """``run``, or the kept states if all rows were computed before, with 0 on padding."""
        keys, tokens = packed.row_keys(), packed.row_tokens()
        if all(key in self.rows for key in keys):
            flat = self.rows[keys[0]].new_zeros(packed.ids.numel(), self.rows[keys[0]].shape[-1])
            for key, index in zip(keys, tokens, strict=True):
                flat[index] = self.rows[key]
            return flat.view(*packed.ids.shape, -1)
        states = self.run(packed)
        limit = _budget(states.device)
        for key, index in zip(keys, tokens, strict=True):
            row = states.flatten(0, 1)[index]
            if self.size + row.nbytes <= limit:
                self.size += 0 if key in self.rows else row.nbytes
                self.rows[key] = row
            elif not self.full:
                self.full = True
                logger.warning(
                    "the states below the trained layers of an iteration take more than %.1f GiB,"
                    " an eighth of the memory: those of the other rows are computed again when"
                    " they are needed",
                    limit / 2**30,
                )
        return states

    def clear(self) -> None:
        """Drop all rows."""
        self.rows.clear()
        self.size = 0

    def serves(self, other: _FrozenLayers) -> bool:
        """Whether the frozen layers of another backbone begin with the same tensors."""
        theirs = dict(other.backbone.named_parameters(remove_duplicate=False))
        alike = type(other.backbone) is type(self.backbone) and other.depth >= self.depth
        return alike and all(theirs.get(name) is p for name, p in self.weights.items())


@dataclass(frozen=True, slots=True)
class _CachedBackbone:
    """A backbone that starts from the states after its frozen layers."""

    backbone: nn.Module
    layers: nn.ModuleList
    below: _FrozenLayers
    requires_grad: bool  # of the states: by a hook on the embedding, for reentrant checkpointing

    def read(self, packed: Packed) -> Tensor:
        """Last hidden states float [b, L, H]; [1, T, H] of joined rows."""
        states = self.below.states(packed)
        if self.requires_grad and torch.is_grad_enabled():
            states = states.detach().requires_grad_()
        output = (states,) if self.below.returns_tuple else states
        skipped = [(x, vars(x).get("forward")) for x in self.layers[: self.below.depth]]
        # The model computes its masks and position embeddings; its embedding is not used.
        for layer, _ in skipped:
            layer.__dict__["forward"] = lambda *_, **__: output
        try:
            return run_backbone(self.backbone, packed.ids, packed.groups)
        finally:
            for layer, forward in skipped:
                del layer.__dict__["forward"]
                layer.__dict__.update({} if forward is None else {"forward": forward})


class BackboneCache:
    """Keeps the states below the trained layers of all models of a learner.

    A model is left out where nothing below is frozen, and where a comparison on a few tokens shows
    that its upper layers read more than these states.

    Args:
        models: objects with a ``backbone``, trained ones first; those without one are left out.
    """

    def __init__(self, models: Iterable[object]) -> None:
        self._below: list[_FrozenLayers] = []
        self._cached: dict[int, _CachedBackbone] = {}
        for model in models:
            backbone = getattr(model, "backbone", None)
            if isinstance(backbone, nn.Module) and id(backbone) not in self._cached:
                self._add(backbone)

    def _add(self, backbone: nn.Module) -> None:
        own, name = _frozen_layers(backbone), type(backbone).__name__
        if own is None:
            return
        below = next((x for x in self._below if x.serves(own)), own)
        if below is own and not any(p.requires_grad for p in backbone.parameters()):
            return  # a reference with other weights, which reads each row once
        try:
            self._cached[id(backbone)] = _verified(backbone, own.layers, below)
        except Exception as error:  # whatever the code of a model raises when layers are replaced
            logger.warning(
                "%s: the states below its trained layers are computed in every pass, since they"
                " cannot be kept: %s",
                *(name, error),
            )
            return
        finally:
            below.clear()
        if below is own:
            self._below.append(own)
            logger.info(
                "%s: %d of %d layers are frozen and computed once per batch",
                *(name, own.depth, len(own.layers)),
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which ``read_backbone`` keeps states and starts from them."""
        token = _active.set(self._cached)
        try:
            yield
        finally:
            _active.reset(token)

    @property
    def skipped(self) -> set[int]:
        """Ids of the weights that a pass from kept states does not read."""
        return {id(p) for below in self._below for p in below.weights.values()}

    def clear(self) -> None:
        """Drop all states."""
        for below in self._below:
            below.clear()


def _frozen_layers(backbone: nn.Module) -> _FrozenLayers | None:
    """The layers below the first one that trains or has an adapter; None if there are none."""
    found = find_layers(backbone)
    if found is None or next(backbone.parameters()).is_meta:
        return None
    prefix, layers = found
    named = dict(backbone.named_parameters(remove_duplicate=False))
    trained = {layer_number(name, prefix) for name, p in named.items() if p.requires_grad}
    modules = backbone.named_modules()
    adapted = {layer_number(n, prefix) for n, m in modules if hasattr(m, "_active_adapter")}
    if None in adapted:  # an adapter outside of the layers may be below them
        return None
    depth = min([layer for layer in trained | adapted if layer is not None], default=len(layers))
    depth = min(depth, len(layers) - 1)
    if depth < 1:
        return None
    weights = {}
    for name, p in named.items():
        layer = layer_number(name, prefix)
        if not p.requires_grad if layer is None else layer < depth:
            weights[name] = p
    return _FrozenLayers(backbone, layers, depth, weights)


def _verified(backbone: nn.Module, layers: nn.ModuleList, below: _FrozenLayers) -> _CachedBackbone:
    """The backbone with kept states, compared with the whole one on a few tokens.

    Raises:
        ValueError: their outputs differ, or a weight below the layers trains.
    """
    rows = next((m.num_embeddings for m in backbone.modules() if isinstance(m, nn.Embedding)), 1)
    ids = (torch.arange(16) % rows).view(2, 8)
    lengths = torch.tensor([8, 8])
    packed = Packed(ids=ids, lengths=lengths, prompt_lengths=lengths)
    packed = packed.to(next(backbone.parameters()).device)
    trained = [p for p in backbone.parameters() if p.requires_grad]
    states = below.run(packed)
    if states.requires_grad and trained:
        gradients = torch.autograd.grad(states.sum(), trained, allow_unused=True)
        if any(gradient is not None for gradient in gradients):
            raise ValueError("a weight below its layers trains")
    cached = _CachedBackbone(backbone, layers, below, states.requires_grad)
    with torch.no_grad():
        whole = run_backbone(backbone, packed.ids)
        cached.read(packed)
        run_backbone(
            backbone, packed.ids.flip(1)
        )  # what the model itself may keep is of other rows
        worst = float((cached.read(packed) - whole).abs().max())
    slack = 1e-5 if whole.dtype in (torch.float32, torch.float64) else 2e-2
    if not worst <= slack * float(whole.abs().max()):
        raise ValueError(f"its upper layers read more than these states (off by {worst:.3g})")
    return cached


@cache
def _budget(device: torch.device) -> float:
    """Bytes of states to keep on a device."""
    if device.type == "cuda":
        return MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    return MEMORY_SHARE * psutil.virtual_memory().total
