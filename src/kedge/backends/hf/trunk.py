"""Trunks of language models, with the states below the trained layers computed once per batch.

Where the lower layers are frozen (``train_layers``, LoRA on the top layers), the states that enter
the lowest trained layer depend on the tokens of a row alone.  They are kept until the iteration
ends; policy, reference, value model and all epochs start from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from kedge.backends.hf.freezing import find_layers, layer_number
from kedge.backends.hf.joined_rows import run_joined
from kedge.backends.hf.last_layer import expect_reads
from kedge.backends.hf.mask_checks import known_masks
from kedge.backends.hf.packing import Packed
from kedge.ops.cpu.joined_attention import Group

logger = logging.getLogger(__name__)

MEMORY_SHARE = 1 / 8  # of the device's memory; rows beyond it are computed again

_active: ContextVar[Mapping[int, _CachedTrunk]] = ContextVar("cached_trunks", default={})  # noqa: B039


def trunk(backbone: nn.Module, ids: Tensor, groups: Sequence[Group] | None = None) -> Tensor:
    """Last hidden states float [b, L, H] of right-padded rows, without an attention mask.

    With ``groups`` the rows are joined (see ``run_joined``): ids [1, T], states [1, T, H].
    """
    if groups is not None:
        return run_joined(backbone, ids, groups)
    with known_masks():
        return backbone(input_ids=ids, use_cache=False).last_hidden_state


def read_trunk(backbone: nn.Module, packed: Packed) -> Tensor:
    """``trunk`` of packed rows; within ``TrunkCache.active`` it starts from kept states.

    Within ``LastLayers.active`` only the states ``packed.read`` are right.
    """
    expect_reads(backbone, packed)
    cached = _active.get().get(id(backbone))
    if cached is None:
        return trunk(backbone, packed.ids, packed.groups)
    return cached.read(packed)


class _Reached(Exception):
    """Ends a forward pass early."""

    def __init__(self, states: Tensor) -> None:
        super().__init__("reached the trained layers")
        self.states = states


@contextmanager
def _replaced(layers: Iterable[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which layers have another forward."""
    layers = list(layers)
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = own


@dataclass(slots=True, eq=False)
class _LowerLayers:
    """The frozen part of a trunk, and the states after it by the tokens of a row."""

    backbone: nn.Module
    layers: nn.ModuleList
    depth: int  # layers in it
    weights: dict[str, nn.Parameter]
    rows: dict[bytes, Tensor] = field(default_factory=dict)  # float [length, H]
    size: int = 0  # bytes of ``rows``
    full: bool = False

    @property
    def frozen(self) -> bool:
        """Whether nothing in it trains; users may change that at any time."""
        return not any(p.requires_grad for p in self.weights.values())

    def run(self, ids: Tensor, groups: Sequence[Group] | None = None) -> Tensor:
        """The states [b, L, H] after the frozen layers; [1, T, H] of joined rows."""

        def stop(hidden_states: Tensor, *_: Any, **__: Any) -> None:
            raise _Reached(hidden_states)

        try:
            with _replaced([self.layers[self.depth]], stop):
                trunk(self.backbone, ids, groups)
        except _Reached as reached:
            return reached.states
        raise RuntimeError("its layers do not run one after another")

    def states(self, packed: Packed) -> Tensor:
        """The same for packed rows; only rows that are not kept are computed."""
        keys, tokens = packed.row_keys(), packed.row_tokens()
        missing = [i for i, key in enumerate(keys) if key not in self.rows]
        computed: dict[bytes, Tensor] = {}
        if missing:
            whole = len(missing) == len(keys)
            part = packed if whole else packed.select(missing)
            with torch.no_grad():
                states = self.run(part.ids, part.groups)
            flat = states.flatten(0, 1)
            rows = [flat[index] for index in part.row_tokens()]
            computed = {keys[i]: row for i, row in zip(missing, rows, strict=True)}
            self._keep(computed)
            if whole:
                return states
        kept = [self.rows[key] if key in self.rows else computed[key] for key in keys]
        flat = kept[0].new_zeros(packed.ids.numel(), kept[0].shape[-1])
        for index, row in zip(tokens, kept, strict=True):
            flat[index] = row
        return flat.view(*packed.ids.shape, -1)

    def _keep(self, computed: Mapping[bytes, Tensor]) -> None:
        for key, row in computed.items():
            size = row.numel() * row.element_size()
            if self.size + size > _budget(row.device):
                if not self.full:
                    logger.warning(
                        "the states below the trained layers of an iteration take more than %.1f"
                        " GiB, an eighth of the memory: those of the other rows are computed again"
                        " when they are needed",
                        _budget(row.device) / 2**30,
                    )
                self.full = True
                return
            self.rows[key] = row
            self.size += size

    def clear(self) -> None:
        """Drop all rows."""
        self.rows.clear()
        self.size = 0

    def serves(self, backbone: nn.Module, depth: int) -> bool:
        """Whether another trunk has the same frozen layers: the same tensors, not equal ones."""
        theirs = dict(backbone.named_parameters(remove_duplicate=False))
        alike = type(backbone) is type(self.backbone) and depth >= self.depth
        return alike and all(theirs.get(name) is p for name, p in self.weights.items())


@dataclass(frozen=True, slots=True)
class _CachedTrunk:
    """A trunk that starts from the states after its frozen layers."""

    backbone: nn.Module
    layers: nn.ModuleList
    lower: _LowerLayers
    returns_tuple: bool
    requires_grad: bool  # by a hook on the embedding, which reentrant checkpointing needs

    def read(self, packed: Packed) -> Tensor:
        """Last hidden states float [b, L, H]; [1, T, H] of joined rows."""
        if not self.lower.frozen:
            return trunk(self.backbone, packed.ids, packed.groups)
        states = self.lower.states(packed)
        if self.requires_grad and torch.is_grad_enabled():
            states = states.detach().requires_grad_()
        # The model computes its masks and position embeddings; its embedding is not used.
        output = (states,) if self.returns_tuple else states
        with _replaced(self.layers[: self.lower.depth], lambda *_, **__: output):
            return trunk(self.backbone, packed.ids, packed.groups)


class TrunkCache:
    """Keeps the states below the trained layers of all models of a learner.

    A model is left out where nothing below is frozen, and where a comparison on a few tokens shows
    that its upper layers read more than these states.

    Args:
        models: objects with a ``backbone``, trained ones first; those without one are left out.
    """

    def __init__(self, models: Iterable[object]) -> None:
        backbones = [getattr(model, "backbone", None) for model in models]
        self._lower: list[_LowerLayers] = []
        self._trunks: dict[int, _CachedTrunk] = {}
        for backbone in backbones:
            if isinstance(backbone, nn.Module) and id(backbone) not in self._trunks:
                self._add(backbone)

    def _add(self, backbone: nn.Module) -> None:
        lower = _frozen_part(backbone)
        if lower is None:
            return
        shared = next((x for x in self._lower if x.serves(backbone, lower.depth)), None)
        if shared is None and not any(p.requires_grad for p in backbone.parameters()):
            return  # a reference with other weights, which reads each row once
        try:
            cached = _verified(backbone, lower.layers, shared or lower)
        except Exception as error:  # whatever the code of a model raises when layers are replaced
            logger.warning(
                "%s: the states below its trained layers are computed in every pass, since they"
                " cannot be kept: %s",
                *(type(backbone).__name__, error),
            )
            return
        finally:
            (shared or lower).clear()
        self._trunks[id(backbone)] = cached
        if shared is None:
            self._lower.append(lower)
            logger.info(
                "%s: %d of %d layers are frozen and computed once per batch",
                *(type(backbone).__name__, lower.depth, len(lower.layers)),
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which ``read_trunk`` keeps states and starts from them."""
        token = _active.set(self._trunks)
        try:
            yield
        finally:
            _active.reset(token)

    @property
    def skipped(self) -> set[int]:
        """Ids of the weights that a pass from kept states does not read."""
        return {id(p) for lower in self._lower for p in lower.weights.values()}

    def clear(self) -> None:
        """Drop all states."""
        for lower in self._lower:
            lower.clear()


def _frozen_part(backbone: nn.Module) -> _LowerLayers | None:
    """The layers below the first one that trains or has an adapter; None if there are none."""
    found = find_layers(backbone)
    if found is None or next(backbone.parameters()).is_meta:
        return None
    prefix, layers = found
    named = dict(backbone.named_parameters(remove_duplicate=False))
    changes = {name for name, p in named.items() if p.requires_grad}
    changes |= {n for n, m in backbone.named_modules() if hasattr(m, "_active_adapter")}
    above = [layer_number(name, prefix) for name in changes]
    # An adapter outside of the layers may be below them; weights are checked by ``_verified``.
    if any(layer_number(n, prefix) is None and n not in named for n in changes):
        return None
    depth = min([layer for layer in above if layer is not None], default=len(layers))
    depth = min(depth, len(layers) - 1)
    if depth < 1:
        return None
    weights = {}
    for name, p in named.items():
        layer = layer_number(name, prefix)
        if not p.requires_grad if layer is None else layer < depth:
            weights[name] = p
    return _LowerLayers(backbone, layers, depth, weights)


def _verified(backbone: nn.Module, layers: nn.ModuleList, lower: _LowerLayers) -> _CachedTrunk:
    """The trunk with kept states, compared with the whole trunk on a few tokens.

    Raises:
        ValueError: their outputs differ, or a weight below the layers trains.
    """
    device = next(backbone.parameters()).device
    rows = next((m.num_embeddings for m in backbone.modules() if isinstance(m, nn.Embedding)), 1)
    ids = (torch.arange(16) % rows).view(2, 8)
    ids[1, 5:] = 0  # padding
    lengths = torch.tensor([8, 5])
    packed = Packed(ids=ids, lengths=lengths, prompt_lengths=lengths).to(device)
    outputs: list[Any] = []
    hook = layers[0].register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        with torch.no_grad():
            whole = trunk(backbone, packed.ids)
    finally:
        hook.remove()
    trained = [p for p in backbone.parameters() if p.requires_grad]
    with torch.enable_grad():
        states = lower.run(packed.ids)
        if states.requires_grad and trained:
            gradients = torch.autograd.grad(states.sum(), trained, allow_unused=True)
            if any(gradient is not None for gradient in gradients):
                raise ValueError("a weight below its layers trains")
    cached = _CachedTrunk(
        backbone, layers, lower, isinstance(outputs[0], tuple), states.requires_grad
    )
    slack = 1e-5 if whole.dtype in (torch.float32, torch.float64) else 2e-2
    with torch.no_grad():
        for _ in range(2):  # computed, then kept
            trunk(backbone, packed.ids.flip(1))  # what the model itself may keep is of other rows
            gap = (cached.read(packed) - whole).abs()
            worst = float(torch.cat([gap[0], gap[1, :5]]).max())
            if not worst <= slack * float(whole.abs().max()):
                raise ValueError(
                    f"its upper layers read more than these states (off by {worst:.3g})"
                )
    return cached


@cache
def _budget(device: torch.device) -> float:
    """Bytes of states to keep on a device."""
    if device.type == "cuda":
        return MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    return MEMORY_SHARE * psutil.virtual_memory().total
