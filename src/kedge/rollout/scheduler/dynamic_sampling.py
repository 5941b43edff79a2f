"""Dynamic sampling: groups of equal scores are replaced by responses to other prompts.

If all responses to a prompt have equal scores, their advantage is 0.  Yu et al. 2025 (DAPO,
arXiv:2503.14476), section 3.2, samples until the batch is full; here rounds are limited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from kedge.math.advantage import group_std
from kedge.types import PromptBatch, Sample

REPLACED = "rollout/resampled_groups"
_FIRST = 2**40  # larger than any real iteration number


def spare_step(step: int, turn: int, rounds: int) -> int:
    """The step number that selects replacement prompts for ``step`` in round ``turn``."""
    return _FIRST + step * rounds + turn


def uniform_rows(sample: Sample) -> Tensor:
    """The rows int64 [n] of groups whose scores are all equal."""
    scores, valid = sample.reward_output.scores, sample.reward_output.valid
    return (~(group_std(scores, sample.rollout.prompts.group, valid) > 0)).nonzero()[:, 0]


def resample_uniform_groups(
    sample: Sample,
    *,
    prompts: Callable[[int], PromptBatch],
    draw: Callable[[PromptBatch, int], Sample],
    rounds: int,
) -> Sample:
    """Replace the groups of a batch whose scores are all equal; their number joins its ``times``.

    Args:
        sample: several responses per prompt, and their scores.
        prompts: round -> a batch of other prompts with the same groups and rows.
        draw: samples and scores given prompts in a round.
        rounds: maximum number of rounds.
    """
    replaced = 0
    for turn in range(rounds):
        index = uniform_rows(sample)
        if not len(index):
            break
        replaced += len(sample.rollout.prompts.group[index].unique())
        fresh = draw(prompts(turn).rows(index), turn)
        sample = sample.put_rows(index, fresh, names=("the first sampling", "a later round"))
    return replace(sample, times={**sample.times, REPLACED: float(replaced)})
