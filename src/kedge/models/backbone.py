"""Runs the backbones of language models: joined rows, and states that are kept.

Joined rows: all layers but attention treat tokens one by one.  They run once over the tokens of all
rows, however different their lengths, and once over a prompt that several rows share.  Attention
runs row by row (``ops/joined_attention.py``); transformers hands the keyword
``packed_segments`` down to its attention function, also when a layer is recomputed.

Kept states: where the lower layers are frozen (``train_layers``, LoRA on the top layers), the
states that enter the lowest trained layer depend only on the tokens of a row.  They are kept until
the iteration ends; policy, reference, value model and all epochs start from them.
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
from kedge.models.packing import JoinedInput
from kedge.ops.attention import causal_inputs, has_own_attention, has_windows, use_own_attention
from kedge.ops.joined_attention import Group
from kedge.ops.products import kernels_enabled

logger = logging.getLogger(__name__)
_PROBE = ((5,), (3, 2, 4), (7,))  # lengths of the groups in the comparison
MEMORY_SHARE = 1 / 8  # share of the device's memory; rows beyond it are recomputed
_active: ContextVar[Mapping[int, _CachedBackbone]] = ContextVar("cached", default={})  # noqa: B039


def pack_sequences(ids: Tensor, lengths: Tensor) -> Tensor:
    """Join right-padded rows int64 [b, L] with lengths [b] to tokens int64 [1, T]."""
    return ids[torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]][None]


def run_packed(backbone: Any, ids: Tensor, groups: Sequence[Group]) -> Tensor:
    """Last hidden states float [1, T, H] of joined rows; ``supports_packing(backbone)`` must hold.

    ``ids`` int64 [1, T] has the tokens of all rows, a shared prompt once.  Of ``groups``, (n,) is a
    row of n tokens, (n, a, b, ...) a prompt of n tokens and the responses to it; their sum is T.
    """
    positions = []
    for prompt, *responses in groups:
        positions.append(torch.arange(prompt, device=ids.device))
        positions += [torch.arange(prompt, prompt + n, device=ids.device) for n in responses]
    if not has_own_attention(backbone):  # torch's would read all rows as one
        use_own_attention(backbone)
    assert has_own_attention(backbone)
    # Prepared masks (4D) are handed down as they are: attention needs none, and transformers would
    # make one [T, T] because positions begin again.
    output = backbone(
        input_ids=ids,
        attention_mask=ids.new_ones(1, 1, 1, 1, dtype=torch.bool),
        position_ids=torch.cat(positions)[None],
        use_cache=False,
        packed_segments=tuple(groups),
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


@torch.no_grad()
def supports_packing(backbone: Any) -> bool:
    """Whether joined rows give the same states as separate rows; tests a few tokens.

    Always False on an accelerator, where padding is cheaper than many small attention kernels, and
    with KEDGE_CPU_KERNELS=0 in the environment.
    """
    weight = next(iter(backbone.parameters()), None)
    if weight is None or weight.device.type != "cpu" or not kernels_enabled():
        return False
    use_own_attention(backbone)
    if not has_own_attention(backbone) or has_windows(backbone.config):
        return False
    training = [m for m in backbone.modules() if m.training]
    backbone.eval()
    try:
        return _agrees(backbone)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False  # its arguments differ
    finally:
        for module in training:
            module.training = True


def _agrees(backbone: Any) -> bool:
    def states(row: Tensor) -> Tensor:
        hidden: Tensor = backbone(input_ids=row[None], use_cache=False).last_hidden_state
        return hidden

    apart, joined_ids = [], []
    for prompt, *responses in _PROBE:
        start = torch.arange(prompt)
        rows = [start, *(torch.arange(n) + 1 for n in responses)]
        joined_ids += rows
        apart.append(states(start))
        apart += [states(torch.cat([start, x]))[:, prompt:] for x in rows[1:]]
    joined = run_packed(backbone, torch.cat(joined_ids)[None], _PROBE)
    expected = torch.cat(apart, dim=1)
    slack = 1e-4 if joined.dtype in (torch.float32, torch.float64) else 2e-2
    gap = (joined - expected).abs().max()
    return joined.shape == expected.shape and bool(gap <= slack * (1 + expected.abs().max()))


def run_backbone(backbone: nn.Module, ids: Tensor, groups: Sequence[Group] | None = None) -> Tensor:
    """Last hidden states float [b, L, H] of right-padded rows, without an attention mask.

    With ``groups`` the rows are joined (see ``run_packed``): ids [1, T], states [1, T, H].
    """
    if groups is not None:
        return run_packed(backbone, ids, groups)
    inputs = causal_inputs(backbone, ids)
    return backbone(input_ids=ids, use_cache=False, **inputs).last_hidden_state


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
            layer.forward = lambda *_, **__: result
        try:
            return run_backbone(self.backbone, packed.ids, packed.groups)
        finally:
            for layer, forward in skipped:
                del layer.forward
                if forward is not None:
                    layer.forward = forward

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
    """Keeps the states below the trained layers of all models of a learner, trained ones first.

    A model is left out if it has no ``backbone``, if no lower layer is frozen, or if its upper
    layers read more than these states.
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
                return  # nothing to cache: a reference with other weights reads each row once
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
