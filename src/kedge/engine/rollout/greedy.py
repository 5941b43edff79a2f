"""Scores of greedy responses, the baseline of ReMax (Li et al. 2023, arXiv:2310.10505)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kedge.types import PromptBatch, RewardOutput, Sampling


def greedy_sampling(sampling: Sampling) -> Sampling:
    """The same lengths and stop conditions, and always the most likely token."""
    return replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def first_rows(prompts: PromptBatch) -> Tensor:
    """The first row of each group, int64 [G], in ascending order of their ids."""
    _, group = prompts.group.unique(return_inverse=True)
    order = torch.arange(len(prompts), device=group.device)
    first = order.new_full((int(group.max()) + 1,), len(prompts))
    return first.scatter_reduce(0, group, order, "amin")


def add_greedy_scores(
    reward_output: RewardOutput, prompts: PromptBatch, greedy: RewardOutput
) -> RewardOutput:
    """Add greedy scores; if the greedy response has no score, the group's rows become invalid.

    Args:
        reward_output: of the sampled responses to ``prompts``.
        prompts: several rows per group.
        greedy: one row per group, in ascending order of their ids.
    """
    _, group = prompts.group.unique(return_inverse=True)
    return replace(
        reward_output,
        greedy_scores=greedy.scores[group],
        valid=reward_output.valid & greedy.valid[group],
    )
