"""Cuts the rows of one optimizer step into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kedge.algorithms.base import Algorithm
from kedge.math.loss_weights import WEIGHTINGS, row_mean
from kedge.protocols import AllReduce
from kedge.types import Experience, MicroBatch, number_prompts


def micro_batches(
    experience: Experience,
    index: Tensor,
    algo: Algorithm,
    micro_rows: int,
    all_reduce: AllReduce,
    *,
    max_tokens: int | None = None,
    by_prompt: bool = False,
) -> Iterator[MicroBatch]:
    """Split an optimizer step into micro-batches; weights are computed before the split.

    Rows are sorted by length, which saves padding and does not change the result.

    Args:
        experience: the rows of this rank, or of all ranks.
        index: int64 [n]; rows of this optimizer step.
        algo: the algorithm, which weights tokens.
        micro_rows: maximum rows of a micro-batch.
        all_reduce: sum over ranks.
        max_tokens: maximum tokens of a micro-batch, padding included, instead of ``micro_rows``.
        by_prompt: keep rows of one prompt together, for a learner that shares them.
    """
    lengths = (experience.prompt_mask.sum(1) + experience.response_mask.sum(1))[index]
    order = lengths.argsort(descending=True, stable=True)
    if by_prompt:
        rows = index[order]
        prompts = number_prompts(experience.prompt_ids[rows], experience.prompt_mask[rows])
        order = order[_first_places(prompts).argsort(stable=True)]
    step = experience.rows(index[order])
    token_weights = WEIGHTINGS[algo.weighting]
    token, value, row = (
        token_weights(step.loss_mask, all_reduce),
        token_weights(step.value_mask, all_reduce),
        row_mean(step.loss_mask, all_reduce),
    )
    sizes: int | list[int] = micro_rows
    if max_tokens is not None:
        sizes = rows_within(lengths[order].tolist(), max_tokens, all_reduce)
    for part in torch.arange(len(step)).split(sizes):
        yield MicroBatch(
            rows=step.rows(part),
            token_weight=token[part],
            value_weight=value[part],
            row_weight=row[part],
        )


def _first_places(numbers: Tensor) -> Tensor:
    """For each number int64 [n], the index of its first occurrence."""
    places = torch.arange(len(numbers), device=numbers.device)
    first = places.new_full((len(numbers),), len(numbers))
    first = first.scatter_reduce(0, numbers, places, "amin") if len(numbers) else first
    return first[numbers]


def rows_within(lengths: Sequence[int], max_tokens: int, all_reduce: AllReduce) -> list[int]:
    """Rows of consecutive micro-batches of at most ``max_tokens`` tokens, padding included.

    All ranks get the same number, as sharded weights require: others split their largest ones.

    Args:
        lengths: tokens of each row; equally many rows on every rank.
        max_tokens: a longer row is a micro-batch by itself.
        all_reduce: sum over ranks.
    """
    sizes: list[int] = []
    longest = 0
    for length in lengths:
        longest = max(longest, length)
        if sizes and longest * (sizes[-1] + 1) <= max_tokens:
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest = length
    ranks_with = torch.zeros(len(lengths) + 1)
    ranks_with[len(sizes)] = 1
    most = int(all_reduce(ranks_with).nonzero().max())
    while len(sizes) < most:
        largest = sizes.index(max(sizes))
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [sizes[largest] - half, half]
    return sizes
