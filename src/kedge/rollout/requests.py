"""Bookkeeping of an engine's requests: rows complete one by one until their groups are complete."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from kedge.types import PromptBatch, Sampling, group_rows

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Groups(Generic[T]):
    """Complete groups, and the result of each row."""

    prompts: PromptBatch
    results: list[T]
    sampling: Sampling  # shared by all rows, with the largest max_new_tokens


class GroupRequests(Generic[T]):
    """The rows of several batches by key, and their results."""

    def __init__(self) -> None:
        self._next = 0  # key of the next row
        self._groups: dict[int, tuple[PromptBatch, Sampling]] = {}  # by group id
        self._results: dict[int, dict[int, T]] = {}  # by group id and index in the group
        self._of_row: dict[int, tuple[int, int]] = {}  # key -> group id and index in the group

    @property
    def unfinished(self) -> int:
        """Rows without a result."""
        return len(self._of_row)

    def add(self, prompts: PromptBatch, sampling: Sampling) -> range:
        """Add whole groups; returns the key of each row, in order."""
        keys = range(self._next, self._next + len(prompts))
        self._next = keys.stop
        for number, rows in zip(*group_rows(prompts), strict=True):
            if number in self._groups:
                raise ValueError(f"group {number} is being sampled; ids of groups must differ")
            self._groups[number], self._results[number] = (prompts.rows(rows), sampling), {}
            self._of_row |= {keys[i]: (number, n) for n, i in enumerate(rows.tolist())}
        return keys

    def put(self, key: int, result: T) -> None:
        """Store the result of a row."""
        number, place = self._of_row.pop(key)
        self._results[number][place] = result

    def complete(self) -> list[Groups[T]]:
        """Remove and return groups with all results, by sampling distribution."""
        done = [
            n for n, (prompts, _) in self._groups.items() if len(prompts) == len(self._results[n])
        ]
        by_distribution: dict[Sampling, list[tuple[PromptBatch, Sampling, list[T]]]] = {}
        for number in done:
            (prompts, sampling), results = self._groups.pop(number), self._results.pop(number)
            ordered = [results[i] for i in range(len(prompts))]
            kind = replace(sampling, max_new_tokens=0)
            by_distribution.setdefault(kind, []).append((prompts, sampling, ordered))
        return [
            Groups(
                PromptBatch.cat([prompts for prompts, _, _ in groups]),
                [result for _, _, results in groups for result in results],
                max((sampling for _, sampling, _ in groups), key=lambda s: s.max_new_tokens),
            )
            for groups in by_distribution.values()
        ]

    def clear(self) -> None:
        """Forget all rows."""
        self._groups.clear()
        self._results.clear()
        self._of_row.clear()


def token_versions(spans: list[list[tuple[int, int]]], size: int) -> torch.Tensor | None:
    """``Rollout.token_version`` int64 [B, size]; None if every row has one version.

    ``spans`` has the versions of each row in order, with the number of tokens from each.
    """
    if all(len(row) <= 1 for row in spans):
        return None
    versions = torch.full((len(spans), size), -1)
    for i, row in enumerate(spans):
        begin = 0
        for version, tokens in row:
            versions[i, begin : begin + tokens] = version
            begin += tokens
    return versions
