"""Dynamic sampling: groups that teach nothing are sampled anew, for other prompts.

Responses to one prompt that all score the same have advantage 0.  Yu et al. 2025 (DAPO,
arXiv:2503.14476), section 3.2; there until the batch is full, here for a bounded number of rounds.
"""

from __future__ import annotations

from collections.abc import Callable

from kedge.math.advantage import group_std
from kedge.types import PromptBatch, RewardOutput, Rollout

REPLACED = "rollout/resampled_groups"
_FIRST = 2**40  # steps from here on name prompts of no training step
Draw = Callable[[PromptBatch, int], tuple[Rollout, RewardOutput]]


def spare_step(step: int, turn: int, rounds: int) -> int:
    """The step whose prompts stand in for those of ``step`` in round ``turn`` of ``rounds``."""
    return _FIRST + step * rounds + turn


def resample_uniform_groups(
    rollout: Rollout,
    reward_output: RewardOutput,
    *,
    prompts: Callable[[int], PromptBatch],
    draw: Draw,
    rounds: int,
) -> tuple[Rollout, RewardOutput, int]:
    """The batch with new groups in place of those whose scores do not differ.

    Args:
        rollout: responses, several to each prompt.
        reward_output: their scores.
        prompts: round -> a batch of other prompts, with the groups and rows of this one.
        draw: samples and scores some of their rows in a round.
        rounds: how often at most.

    Returns:
        Rollout, reward output, and how many groups were replaced.
    """
    replaced = 0
    for turn in range(rounds):
        group = rollout.prompts.group
        bare = ~(group_std(reward_output.scores, group, reward_output.valid) > 0)
        index = bare.nonzero().squeeze(1)
        if not len(index):
            break
        fresh, verdict = draw(prompts(turn).rows(index), turn)
        rollout = rollout.put_rows(index, fresh, names=("the first sampling", "a later round"))
        reward_output = reward_output.put_rows(index, verdict).widened_to(rollout)
        replaced += len(group[index].unique())
    return rollout, reward_output, replaced
