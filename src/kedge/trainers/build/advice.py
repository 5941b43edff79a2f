"""Warnings at the start of a run: settings that train, but seldom well, and what to set instead.

Defaults that come from other libraries stay as they are, so that a moved script trains as before.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from kedge.config.base import OnPolicyConfig
from kedge.config.grpo import GRPOConfig

LARGE = 300_000_000  # weights; smaller models take larger steps, and are for trying things out
HIGH_RATE = 2e-5
SMALL_BATCH = 16  # responses
WIDE_CLIP = 0.01
N_PLUS = "(Huang et al. 2024, arXiv:2403.17031)"


def advise(args: OnPolicyConfig, policy: nn.Module, *, batch_size: int) -> Iterable[str]:
    """What to change in the settings, with the source of the recommended values.

    Args:
        args: the config.
        policy: whole, before it is sharded.
        batch_size: responses of an iteration, over all ranks.
    """
    weights = sum(p.numel() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    high = args.learning_rate >= HIGH_RATE and args.num_ppo_epochs > 1
    if high and trained >= LARGE:  # adapters take larger steps
        yield (
            f"learning_rate={args.learning_rate:g} with num_ppo_epochs={args.num_ppo_epochs} is"
            f" high for {trained / 1e6:,.0f} million trained weights; recommended:"
            f" learning_rate=3e-6 {N_PLUS}"
        )
    if batch_size <= SMALL_BATCH and weights >= LARGE:
        yield (
            f"an iteration has {batch_size} responses, which makes gradients noisy; recommended:"
            f" 512, by a larger gradient_accumulation_steps {N_PLUS}"
        )
    if (
        isinstance(args, GRPOConfig)
        and args.importance_sampling_level == "sequence"
        and args.epsilon >= WIDE_CLIP
    ):
        yield (
            f"epsilon={args.epsilon:g} with importance_sampling_level='sequence' hardly ever clips,"
            " since the ratio is a mean over the response; recommended: epsilon=3e-4,"
            " epsilon_high=4e-4 (Zheng et al. 2025, arXiv:2507.18071)"
        )
