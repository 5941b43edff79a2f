"""Rows of prompt and response without the padding between them.

A row of the batch is a left-padded prompt and a right-padded response.  A causal model is fed
prompt and response joined, padding last: every real token then attends to real tokens only, and
stands at its true position, without any attention mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kedge.types import Experience, MicroBatch, PromptBatch, Rollout

Record = TypeVar("Record", Rollout, Experience, PromptBatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Joined rows, and the positions of the states to read."""

    ids: Tensor  # int64 [b, L]; right-padded with 0
    lengths: Tensor  # int64 [b]; real tokens
    prompt_lengths: Tensor  # int64 [b]
    source: tuple[Tensor, Tensor] | None = None  # ids, mask [b, S], what an encoder reads

    def states(self, slots: Tensor) -> Tensor:
        """Flat indices int64 [n] into [b * L] of the states before the marked response slots.

        Args:
            slots: bool [b, R]; the state before slot t has read the prompt and t response tokens.
        """
        row, t = slots.nonzero(as_tuple=True)
        return row * self.ids.shape[1] + self.prompt_lengths[row] + t - 1

    @property
    def ends(self) -> Tensor:
        """Flat indices int64 [b] of the states after the last real token."""
        rows = torch.arange(len(self.ids), device=self.ids.device)
        return rows * self.ids.shape[1] + self.lengths - 1


def pack(prompt_ids: Tensor, prompt_mask: Tensor, ids: Tensor, present: Tensor) -> Packed:
    """Join prompts and responses.

    Args:
        prompt_ids: int64 [b, P], left-padded.
        prompt_mask: bool [b, P].
        ids: int64 [b, R], right-padded.
        present: bool [b, R], a prefix of each row.
    """
    prompt_lengths = prompt_mask.sum(1)
    mask = torch.cat([prompt_mask, present], dim=1)
    lengths = mask.sum(1)
    joined = torch.cat([prompt_ids, ids], dim=1)
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    longest = int(lengths.max()) if len(lengths) else 0
    packed = joined.masked_fill(~mask, 0).gather(1, order)[:, :longest]
    return Packed(ids=packed, lengths=lengths, prompt_lengths=prompt_lengths)


def place(flat: Tensor, slots: Tensor) -> Tensor:
    """Scatter values [n] to the marked slots of bool [b, R]; 0 elsewhere.  Differentiable."""
    return flat.new_zeros(slots.shape).masked_scatter(slots, flat)


def by_length(lengths: Sequence[int], *, tokens: int, spare: int) -> list[list[int]]:
    """Group rows of similar length, so that padding each group wastes little.

    Args:
        lengths: real tokens of each row.
        tokens: maximum padded tokens of a group (a longer row forms its own group).
        spare: maximum padding of a group, about the cost of one more forward pass.

    Returns:
        Row numbers, longest first; each row once.
    """
    groups: list[list[int]] = []
    waste = longest = 0
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        more = waste + longest - lengths[row]
        if groups and more <= spare and longest * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(row)
            waste = more
        else:
            groups.append([row])
            longest, waste = lengths[row], 0
    return groups


def split_by_length(
    step: Iterable[MicroBatch], device: torch.device, *, spare: int
) -> Iterator[MicroBatch]:
    """Micro-batches on the device, split further where rows differ much in length.

    Args:
        step: any rows; their weights are kept.
        device: target device.
        spare: maximum padding of a micro-batch.
    """
    for uncut in step:
        rows = uncut.rows
        lengths = (rows.prompt_mask.sum(1) + rows.response_mask.sum(1)).tolist()
        for group in by_length(lengths, tokens=2**62, spare=spare):
            index = torch.tensor(group, device=rows.ids.device)
            yield MicroBatch(
                rows=to_device(rows.rows(index), device),
                token_weight=uncut.token_weight[index].to(device),
                value_weight=uncut.value_weight[index].to(device),
                row_weight=uncut.row_weight[index].to(device),
            )


def padding_budget(model: nn.Module, head: nn.Module) -> int:
    """Tokens of padding that cost as much as one more forward and backward pass of a model.

        seconds of a pass = launch + 12 bytes * weights that train / bandwidth
        seconds of a token = 6 * weights between embedding and head / arithmetic

    with rough figures for one CPU core or one GPU.
    """
    ends = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    outside = {id(p) for m in [*ends, head] for p in m.parameters()}
    trunk = sum(p.numel() for p in model.parameters() if id(p) not in outside)
    trains = sum(p.numel() for p in model.parameters() if p.requires_grad)
    cpu = next(model.parameters()).device.type == "cpu"
    launch, bandwidth, arithmetic = (8e-3, 1e10, 1e11) if cpu else (3e-2, 1e12, 2e14)
    return 1 + int((launch + 12 * trains / bandwidth) / (6 * max(trunk, 1) / arithmetic))


def to_device(record: Record, device: torch.device) -> Record:
    """A record with its tensors, and those of the records in it, on a device."""
    moved: dict[str, Any] = {}
    for field in fields(record):
        x = getattr(record, field.name)
        if isinstance(x, Tensor):
            moved[field.name] = x.to(device, non_blocking=True)
        elif isinstance(x, PromptBatch):
            moved[field.name] = to_device(x, device)
    return replace(record, **moved)
