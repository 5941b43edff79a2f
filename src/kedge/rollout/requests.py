"""Requests that an engine holds: rows that complete one by one, until their groups are complete."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from kedge.types import PromptBatch, Sampling, group_rows

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteGroups(Generic[T]):
    """Whole groups, and the result of each row."""

    prompts: PromptBatch
    results: list[T]
    sampling: Sampling | None  # of all of them, with the largest max_new_tokens


class GroupRequests(Generic[T]):
    """The rows of several batches by key, and their results."""

    def __init__(self) -> None:
        self._next = 0  # key
        self._groups: dict[int, _Group[T]] = {}  # by group id
        self._of_row: dict[int, tuple[int, int]] = {}  # group id and place in it, by key
        self._done: list[int] = []  # ids of complete groups

    @property
    def unfinished(self) -> int:
        """Rows without a result."""
        return len(self._of_row)

    def add(self, prompts: PromptBatch, sampling: Sampling | None = None) -> range:
        """Hold whole groups; returns a key for each row, in their order.

        Args:
            prompts: the rows.
            sampling: of these rows, to be returned with their results.

        Raises:
            ValueError: a group with this id is held.
        """
        keys = range(self._next, self._next + len(prompts))
        self._next = keys.stop
        for number, rows in zip(*group_rows(prompts), strict=True):
            if number in self._groups:
                raise ValueError(f"group {number} is being sampled; ids of groups must differ")
            self._groups[number] = _Group(prompts.rows(rows), sampling)
            self._of_row |= {keys[i]: (number, n) for n, i in enumerate(rows.tolist())}
        return keys

    def put(self, key: int, result: T) -> None:
        """The result of a row."""
        number, place = self._of_row.pop(key)
        group = self._groups[number]
        group.results[place] = result
        if len(group.results) == len(group.prompts):
            self._done.append(number)

    def complete(self) -> list[CompleteGroups[T]]:
        """Remove the groups of which all rows have results, by their distribution."""
        by_distribution: dict[Sampling | None, list[_Group[T]]] = {}
        for group in (self._groups.pop(number) for number in self._done):
            kind = group.sampling and replace(group.sampling, max_new_tokens=0)
            by_distribution.setdefault(kind, []).append(group)
        self._done = []
        return [_joined(groups) for groups in by_distribution.values()]

    def clear(self) -> None:
        """Forget all rows."""
        self._groups.clear()
        self._of_row.clear()
        self._done.clear()


class _Group(Generic[T]):
    def __init__(self, prompts: PromptBatch, sampling: Sampling | None) -> None:
        self.prompts, self.sampling = prompts, sampling
        self.results: dict[int, T] = {}


def _joined(groups: list[_Group[T]]) -> CompleteGroups[T]:
    sampling = [group.sampling for group in groups if group.sampling is not None]
    return CompleteGroups(
        prompts=PromptBatch.cat([group.prompts for group in groups]),
        results=[group.results[i] for group in groups for i in range(len(group.prompts))],
        sampling=max(sampling, key=lambda s: s.max_new_tokens) if sampling else None,
    )


def token_versions(spans: list[list[tuple[int, int]]], size: int) -> torch.Tensor | None:
    """``Rollout.token_version`` int64 [B, size]; None if every row has one version.

    Args:
        spans: of each row, the versions in order and the number of tokens from each.
        size: width of the rollout.
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
