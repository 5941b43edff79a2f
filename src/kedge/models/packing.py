"""Rows of prompt and response without the padding between them.

A row of the batch is a left-padded prompt and a right-padded response.  A causal model is fed
prompt and response joined, padding last: every real token then attends to real tokens only, and
stands at its true position, without any attention mask.  On a CPU the rows themselves are joined
(``backbone.py``), which leaves no padding at all, and a prompt of several rows stands only once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kedge.ops.joined_attention import Group
from kedge.records.types import MicroBatch, Rollout, number_prompts

_SHARED = 16  # prompt tokens that sharing must save


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedInput:
    """Joined rows, and the number of real tokens of each.

    A row whose response begins a new context is read as several rows, the later ones without
    prompt; ``context`` and ``offset`` say where its tokens stand.
    """

    ids: Tensor  # int64 [b, L], right-padded with 0; or joined, [1, T]
    lengths: Tensor  # int64 [b]; number of real tokens
    prompt_lengths: Tensor  # int64 [b]
    source: tuple[Tensor, Tensor] | None = None  # encoder input: ids, mask [b, S]
    host_ids: Tensor | None = None  # ``ids`` before they were moved to a device
    groups: tuple[Group, ...] | None = None  # segments of joined rows, see ``run_packed``
    # int64 [b]; flat indices of first tokens in joined rows
    prompt_starts: Tensor | None = None
    response_starts: Tensor | None = None
    # int64 [b, R] of the batch's rows; the row here that a slot belongs to, and its place in it
    context: Tensor | None = None
    offset: Tensor | None = None

    def _starts(self) -> tuple[Tensor, Tensor]:
        """Flat indices int64 [b] of the first tokens of prompts and responses."""
        if self.prompt_starts is not None and self.response_starts is not None:
            return self.prompt_starts, self.response_starts
        first = torch.arange(len(self.ids), device=self.lengths.device) * self.ids.shape[1]
        return first, first + self.prompt_lengths

    def states(self, slots: Tensor) -> Tensor:
        """Flat indices int64 [n] into ``ids`` of the states before the marked slots bool [b, R].

        The state before slot t has read the prompt and t response tokens.
        """
        row, t = slots.nonzero(as_tuple=True)
        if self.context is not None and self.offset is not None:
            row, t = self.context[row, t], self.offset[row, t]
        return self._before(row, t)

    @property
    def ends(self) -> Tensor:
        """Flat indices int64 [b] of the states after the last real token."""
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        if self.context is not None:
            rows = self.context[:, -1]
        return self._before(rows, (self.lengths - self.prompt_lengths)[rows])

    def _before(self, row: Tensor, t: Tensor) -> Tensor:
        """Flat indices of the states after t response tokens; t = 0 is the end of the prompt."""
        prompts, responses = self._starts()
        after = torch.where(t > 0, responses[row] + t, (prompts + self.prompt_lengths)[row])
        return (after - 1).clamp(min=0)  # before a new context there is nothing

    def to(self, device: torch.device) -> JoinedInput:
        """Move the model's inputs to a device; lengths stay on the host."""
        source = self.source and (self.source[0].to(device), self.source[1].to(device))
        return replace(self, ids=self.ids.to(device), source=source, host_ids=self.ids)

    def row_tokens(self) -> list[Tensor]:
        """Flat indices int64 of the real tokens of each row, into ``ids`` and its states."""
        prompts, responses = (starts.tolist() for starts in self._starts())
        both = zip(
            prompts, responses, self.prompt_lengths.tolist(), self.lengths.tolist(), strict=True
        )
        device = self.ids.device
        return [
            torch.cat(
                [
                    torch.arange(first, first + before, device=device),
                    torch.arange(second, second + all_tokens - before, device=device),
                ]
            )
            for first, second, before, all_tokens in both
        ]

    def row_keys(self) -> list[bytes]:
        """The real tokens of each row; equal for equal rows."""
        host = (self.ids if self.host_ids is None else self.host_ids).flatten()
        return [host[index.cpu()].numpy().tobytes() for index in self.row_tokens()]


def pack(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    ids: Tensor,
    response_mask: Tensor,
    context_start: Tensor | None = None,
    *,
    joined: bool = False,
) -> JoinedInput:
    """Join left-padded prompts [b, P] and right-padded responses [b, R].

    Tokens in ``context_start`` bool [b, R] begin a new context, read without what is before.  If
    ``joined``, the rows are joined, too, without padding, and share equal prompts.
    """
    if context_start is not None and context_start.any():
        counts = context_start.sum(1) + 1
        context = context_start.cumsum(1) + (counts.cumsum(0) - counts)[:, None]
        slots = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        offset = slots - slots.where(context_start, 0).cummax(1).values
        rows = torch.arange(len(ids), device=ids.device).repeat_interleave(counts)
        first = torch.cat([rows.new_ones(1), rows.diff()]).bool()
        at = context[response_mask], offset[response_mask]
        parts = ids.new_zeros(len(rows), ids.shape[1])
        parts[at] = ids[response_mask]
        real = torch.zeros_like(parts, dtype=torch.bool)
        real[at] = True
        prompts = prompt_ids[rows], prompt_mask[rows] & first[:, None]
        return replace(pack(*prompts, parts, real, joined=joined), context=context, offset=offset)
    prompt_lengths = prompt_mask.sum(1)
    mask = torch.cat([prompt_mask, response_mask], dim=1)
    lengths = mask.sum(1)
    both = torch.cat([prompt_ids, ids], dim=1)
    if joined:
        numbers = number_prompts(prompt_ids, prompt_mask).tolist()
        return join(both, mask, prompt_lengths, lengths, numbers)
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    longest = int(lengths.max()) if len(lengths) else 0
    packed = both.masked_fill(~mask, 0).gather(1, order)[:, :longest]
    return JoinedInput(ids=packed, lengths=lengths, prompt_lengths=prompt_lengths)


def join(
    ids: Tensor, mask: Tensor, prompt_lengths: Tensor, lengths: Tensor, prompts: Sequence[int]
) -> JoinedInput:
    """Join rows [b, L] that share a prompt, if that saves enough, and then these groups.

    ``prompts`` has the number of each row's prompt, whose ``prompt_lengths`` int64 [b] are equal.
    """
    members: dict[int, list[int]] = {}
    for row, number in enumerate(prompts):
        members.setdefault(number, []).append(row)
    tokens, groups, at = [], [], 0
    prompt_starts, response_starts = torch.zeros_like(lengths), torch.zeros_like(lengths)
    for rows in members.values():
        start = int(prompt_lengths[rows[0]])
        shared = start * (len(rows) - 1) >= _SHARED
        for number, row in enumerate(rows):
            real, first = ids[row, mask[row]], number == 0 or not shared
            prompt_starts[row] = at if first else prompt_starts[rows[0]]
            tokens.append(real if first else real[start:])
            at += len(tokens[-1])
            response_starts[row] = at - len(real) + start
        after = (lengths[rows] - start).tolist()
        if shared:
            groups.append((start, *(n for n in after if n)))
        else:
            groups += [(start + n,) for n in after]
    return JoinedInput(
        ids=torch.cat(tokens)[None],
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        groups=tuple(groups),
        prompt_starts=prompt_starts,
        response_starts=response_starts,
    )


def scatter(flat: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Scatter values [n] to the flat indices [n] of a tensor of ``shape``; 0 elsewhere."""
    return flat.new_zeros(shape.numel()).index_copy(0, index, flat).view(shape)


def by_length(lengths: Sequence[int], *, tokens: int, max_padding: int) -> list[list[int]]:
    """Group rows of similar length, so that padding each group wastes little; longest first.

    A group has at most ``tokens`` with padding (a longer row forms its own), and ``max_padding`` of
    padding: about the cost of one more forward pass.
    """
    groups: list[list[int]] = []
    waste = longest = 0
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        more = waste + longest - lengths[row]
        if groups and more <= max_padding and longest * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(row)
            waste = more
        else:
            groups.append([row])
            longest, waste = lengths[row], 0
    return groups


def forward_passes(
    rollout: Rollout, rows: int, max_padding: int, *, by_prompt: bool = False
) -> list[list[int]]:
    """Group the rows of a rollout into forward passes of ``rows`` rows of the longest one's length.

    ``max_padding`` as in ``by_length``; ``by_prompt`` keeps rows of one prompt together, to be
    joined.
    """
    lengths = (rollout.prompts.mask.sum(1) + rollout.response_mask.sum(1)).tolist()
    tokens = rows * max(lengths)
    numbers = number_prompts(rollout.prompts.ids, rollout.prompts.mask).tolist()
    if not by_prompt or len(set(numbers)) == len(numbers):
        return by_length(lengths, tokens=tokens, max_padding=max_padding)
    groups: list[list[int]] = [[]]
    left = tokens
    for row in sorted(range(len(numbers)), key=numbers.__getitem__):
        if lengths[row] > left:
            groups.append([])
            left = tokens
        groups[-1].append(row)
        left -= lengths[row]
    return groups


def split_by_length(step: Iterable[MicroBatch], *, max_padding: int) -> Iterator[MicroBatch]:
    """Split micro-batches further where rows differ much in length; weights are kept."""
    for micro_batch in step:
        rows = micro_batch.rows
        lengths = (rows.prompt_mask.sum(1) + rows.response_mask.sum(1)).tolist()
        for group in by_length(lengths, tokens=2**62, max_padding=max_padding):
            index = torch.tensor(group, device=rows.ids.device)
            yield MicroBatch(
                rows=rows.rows(index),
                token_weight=micro_batch.token_weight[index],
                value_weight=micro_batch.value_weight[index],
                row_weight=micro_batch.row_weight[index],
            )


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """A micro-batch with all tensors on a device."""
    return MicroBatch(
        rows=micro_batch.rows.to(device),
        token_weight=micro_batch.token_weight.to(device),
        value_weight=micro_batch.value_weight.to(device),
        row_weight=micro_batch.row_weight.to(device),
    )


def padding_budget(
    model: nn.Module, head: nn.Module, skipped: Collection[int] = (), *, joined: bool = False
) -> int:
    """Tokens of padding that cost as much as one more forward and backward pass of a model.

    No limit for joined rows, which have no padding.  Otherwise:

        seconds of a pass = launch + 12 bytes * weights that train / bandwidth
        seconds of a token = 6 * weights between embedding and head / arithmetic

    with rough figures for one CPU core or one GPU, without the weights whose ids are ``skipped``:
    their outputs are kept, so that passes do not read them.
    """
    if joined:
        return 2**62
    ends = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    outside = {id(p) for m in [*ends, head] for p in m.parameters()} | {*skipped}
    backbone = sum(p.numel() for p in model.parameters() if id(p) not in outside)
    trains = sum(p.numel() for p in model.parameters() if p.requires_grad)
    cpu = next(model.parameters()).device.type == "cpu"
    launch, bandwidth, arithmetic = (8e-3, 1e10, 1e11) if cpu else (3e-2, 1e12, 2e14)
    return 1 + int((launch + 12 * trains / bandwidth) / (6 * max(backbone, 1) / arithmetic))
