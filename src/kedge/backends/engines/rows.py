"""Records cut into shares of rows, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kedge.types import PromptBatch, Rollout


def shares(rows: int, parts: int) -> list[slice]:
    """Consecutive rows, as even as they go; fewer shares than asked for where rows are few.

    >>> [(s.start, s.stop) for s in shares(5, 2)]
    [(0, 2), (2, 5)]
    """
    ends = [rows * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(ends) if b > a]


def cut(prompts: PromptBatch, rows: slice) -> PromptBatch:
    """Some of the rows, with their columns."""
    columns = {name: values[rows] for name, values in prompts.columns.items()}
    return PromptBatch(
        ids=prompts.ids[rows],
        mask=prompts.mask[rows],
        group=prompts.group[rows],
        row=prompts.row[rows],
        columns=columns,
    )


def bare(prompts: PromptBatch) -> PromptBatch:
    """The prompts as an engine elsewhere needs them: on the CPU, without dataset columns."""
    tensors = {n: getattr(prompts, n).cpu() for n in ("ids", "mask", "group", "row")}
    return replace(prompts, **tensors, columns={})


def stack_prompts(parts: Sequence[PromptBatch]) -> PromptBatch:
    """The rows of all parts, padded on the left to the longest; without columns.

    Groups of different parts stay apart, though their numbers be the same.
    """
    size = max(p.ids.shape[1] for p in parts)
    sizes = [0, *(int(p.group.max()) + 1 if len(p) else 0 for p in parts)]
    starts = list(accumulate(sizes))

    def wide(x: Tensor) -> Tensor:
        return pad(x, (size - x.shape[1], 0))

    return PromptBatch(
        ids=torch.cat([wide(p.ids) for p in parts]),
        mask=torch.cat([wide(p.mask) for p in parts]),
        group=torch.cat([p.group + start for p, start in zip(parts, starts, strict=False)]),
        row=torch.cat([p.row for p in parts]),
    )


def join(prompts: PromptBatch, parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """The rollout of all prompts out of those of its shares, in order, as wide as the widest."""
    device = prompts.ids.device
    size = max(p.ids.shape[1] for p in parts)
    fills: Mapping[str, float] = {"ids": pad_id, "support": -1}

    def wide(name: str) -> Tensor | None:
        found: list[Tensor] = [x for p in parts if (x := getattr(p, name)) is not None]
        if not found:
            return None
        deep = max(x.shape[-1] for x in found)
        joined = []
        for x in found:
            last = [] if x.ndim == 2 else [0, deep - x.shape[-1]]
            room = [*last, 0, size - x.shape[1]]
            joined.append(pad(x, room, value=fills.get(name, 0)).to(device))
        return torch.cat(joined)

    whole = {n: wide(n) for n in ("ids", "mask", "present", "behavior_logprobs", "support")}
    flat = {
        n: torch.cat([getattr(p, n).to(device) for p in parts]) for n in ("finished", "version")
    }
    return Rollout(prompts=prompts, **whole, **flat)  # type: ignore[arg-type]


def answering(found: Rollout, prompts: PromptBatch) -> Rollout:
    """What an engine elsewhere sampled, for the prompts as they were asked for."""
    device = prompts.ids.device
    held = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "prompts"}
    moved: dict[str, Any] = {name: x if x is None else x.to(device) for name, x in held.items()}
    return Rollout(prompts=prompts, **moved)


def share_of(rollout: Rollout, rows: slice, prompts: PromptBatch, spare: int) -> Rollout:
    """Some of the rows for the prompts they answer, as wide as their longest and ``spare`` more."""
    longest = int(rollout.present[rows].sum(1).max())
    size = min(longest + spare, rollout.ids.shape[1])
    names = ("ids", "mask", "present", "behavior_logprobs", "support")
    held = {n: x for n in names if (x := getattr(rollout, n)) is not None}
    wide = {n: x[rows, :size].clone() for n, x in held.items()}
    flat = {n: getattr(rollout, n)[rows].clone() for n in ("finished", "version")}
    return Rollout(prompts=prompts, **wide, **flat)
