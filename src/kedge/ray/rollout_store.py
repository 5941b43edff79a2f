"""Responses in Ray's object store: engines write them, and the ranks that train on them read them.

Rank 0 has the engines sample for all ranks, but handles references only: each rank reads its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.errors import RolloutError
from kedge.ray.actor import HEALTH
from kedge.ray.cluster import cause
from kedge.ray.context import RankContext, get_context
from kedge.rollout.rows import join_rollouts, slice_rollout, without_columns
from kedge.types import PromptBatch, Rollout

_KNOWN = ("prompts", "response_mask", "episodes")  # to the reader, from the lengths, or absent
_TICKETS = itertools.count()
_REFERENCES: dict[int, Sequence[Any]] = {}  # by ticket; in the process of rank 0


@dataclass(frozen=True, slots=True)
class PackedRollout:
    """A rollout without prompts and padding, as numpy arrays, which Ray reads without a copy.

    Args:
        width: of the rollout, R.
        lengths: int32 [B]; real tokens of each row.
        rows: by field, [B, ...]; integers as int32.
        tokens: by field, [real tokens of all rows, ...]; integers as int32.
    """

    width: int
    lengths: Any
    rows: Mapping[str, Any]
    tokens: Mapping[str, Any]

    @classmethod
    def pack(cls, rollout: Rollout) -> PackedRollout:
        """The rollout of an engine, without environments."""
        rollout = rollout.to("cpu")
        mask = rollout.response_mask
        named = {f.name: getattr(rollout, f.name) for f in fields(rollout) if f.name not in _KNOWN}
        return cls(
            width=mask.shape[1],
            lengths=mask.sum(1, dtype=torch.int32).numpy(),
            rows={n: _compact(x) for n, x in named.items() if x is not None and x.ndim == 1},
            tokens={n: _compact(x[mask]) for n, x in named.items() if x is not None and x.ndim > 1},
        )

    def unpack(self, prompts: PromptBatch, pad_id: int) -> Rollout:
        """The rollout, on the CPU, with ``pad_id`` after the end of each response."""
        mask = np.arange(self.width) < self.lengths[:, None]
        named: dict[str, Any] = {n: torch.from_numpy(_wide(x)) for n, x in self.rows.items()}
        fills = {f.name: f.metadata.get("fill", 0) for f in fields(Rollout)} | {"ids": pad_id}
        for name, x in self.tokens.items():
            padded = np.full((*mask.shape, *x.shape[1:]), fills[name], _wide(x[:0]).dtype)
            padded[mask] = x
            named[name] = torch.from_numpy(padded)
        return Rollout(prompts=prompts, response_mask=torch.from_numpy(mask), **named)


def _compact(x: Tensor) -> Any:
    return x.to(torch.int32 if x.dtype == torch.int64 else x.dtype).numpy()


def _wide(x: Any) -> Any:
    return x.astype(np.int64 if x.dtype == np.int32 else x.dtype)


def pack_shares(rollout: Rollout, sizes: Sequence[int], *, extra: int) -> tuple[Any, ...]:
    """The versions in a rollout, and its rows by share; what the actor of an engine returns.

    Args:
        rollout: of all rows.
        sizes: number of rows of each share, in order.
        extra: slots after the longest response of a share.
    """
    ends = [0, *itertools.accumulate(sizes)]
    slices = [slice(a, b) for a, b in pairwise(ends)]
    parts = [slice_rollout(rollout, s, rollout.prompts.rows(s), extra) for s in slices]
    return rollout.version.unique().tolist(), *map(PackedRollout.pack, parts)


def read_rows(references: Sequence[Any], prompts: PromptBatch, pad_id: int) -> Rollout:
    """The rollout of consecutive rows from the object store.

    Args:
        references: each a ``ray.ObjectRef`` of a ``PackedRollout``.
        prompts: of all rows.
        pad_id: fills ``Rollout.ids`` after the end of a response.

    Raises:
        RolloutError: the node that held them is lost.
    """
    import ray

    try:
        packed: list[PackedRollout] = ray.get(list(references))
    except ray.exceptions.RayError as error:
        raise RolloutError(
            f"responses were lost with their node before this rank read them: {cause(error)};"
            " resume the run from its latest checkpoint"
        ) from error
    sent, parts, begin = without_columns(prompts), [], 0
    for part in packed:
        rows = slice(begin, begin + len(part.lengths))
        parts.append(part.unpack(sent.rows(rows), pad_id))
        begin = rows.stop
    return join_rollouts(prompts, parts, pad_id)


class RankExchange:
    """Hands the rows of each rank to it, as references that rank 0 got from engines.

    Args:
        context: of this rank.
        pad_id: fills ``Rollout.ids`` after the end of a response.
    """

    def __init__(self, context: RankContext, pad_id: int) -> None:
        self._context, self._pad_id = context, pad_id

    def hand_out(self, shares: Sequence[Sequence[Any]]) -> list[int]:
        """A ticket for each share of references, with which one rank reads it.  On rank 0."""
        tickets = [next(_TICKETS) for _ in shares]
        _REFERENCES.update(zip(tickets, shares, strict=True))
        return tickets

    def read(self, ticket: int, prompts: PromptBatch) -> Rollout:
        """The rollout of a share, once.

        Raises:
            RolloutError: rank 0 is lost, or the node that held a part of it.
        """
        import ray

        if self._context.rank == 0:
            return read_rows(take_references(ticket), prompts, self._pad_id)
        # Not with the ticket: Ray does not count references that it does not carry itself.
        take = self._context.first.take_references.options(concurrency_group=HEALTH)
        try:
            references = ray.get(take.remote(ticket))
        except ray.exceptions.RayActorError as error:
            raise RolloutError(
                "rank 0, which has the references to the responses of this rank, is lost:"
                f" {cause(error)}; resume the run from its latest checkpoint"
            ) from error
        return read_rows(references, prompts, self._pad_id)


def take_references(ticket: int) -> Sequence[Any]:
    """The references of a share, which are forgotten.  On rank 0."""
    return _REFERENCES.pop(ticket)


def exchange_of_launch(pad_id: int) -> RankExchange | None:
    """The exchange of the ranks that ``launch`` started; None outside a launch, without Ray."""
    context = get_context()
    return None if context is None else RankExchange(context, pad_id)
