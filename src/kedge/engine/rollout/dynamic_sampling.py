"""Dynamic sampling: groups of equal scores are replaced by responses to other prompts.

If all responses to a prompt have equal scores, their advantage is 0.  Yu et al. 2025 (DAPO,
arXiv:2503.14476), section 3.2, samples until the batch is full; here rounds are limited.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kedge.math.advantage import group_std
from kedge.types import PromptBatch, RewardOutput, Rollout

REPLACED = "rollout/resampled_groups"
_FIRST = 2**40  # above the number of any real iteration
Draw = Callable[[PromptBatch, int], tuple[Rollout, RewardOutput]]


def spare_step(step: int, turn: int, rounds: int) -> int:
    """The step number that selects replacement prompts for ``step`` in round ``turn``."""
    return _FIRST + step * rounds + turn


def uniform_rows(rollout: Rollout, reward_output: RewardOutput) -> Tensor:
    """The rows int64 [n] of groups whose scores are all equal."""
    group = rollout.prompts.group
    uniform = ~(group_std(reward_output.scores, group, reward_output.valid) > 0)
    return uniform.nonzero()[:, 0]


def resample_uniform_groups(
    rollout: Rollout,
    reward_output: RewardOutput,
    *,
    prompts: Callable[[int], PromptBatch],
    draw: Draw,
    rounds: int,
) -> tuple[Rollout, RewardOutput, int]:
    """Replace the groups of a batch whose scores are all equal.

    Args:
        rollout: responses, several per prompt.
        reward_output: their scores.
        prompts: round -> a batch of other prompts with the same groups and rows.
        draw: samples and scores given prompts in a round.
        rounds: maximum number of rounds.

    Returns:
        Rollout, reward output, and the number of groups replaced.
    """
    replaced = 0
    for turn in range(rounds):
        index = uniform_rows(rollout, reward_output)
        if not len(index):
            break
        group = rollout.prompts.group
        new_rollout, new_reward = draw(prompts(turn).rows(index), turn)
        rollout = rollout.put_rows(
            index, new_rollout, names=("the first sampling", "a later round")
        )
        reward_output = reward_output.put_rows(index, new_reward).widened_to(rollout)
        replaced += len(group[index].unique())
    return rollout, reward_output, replaced
