"""Responses to the prompts of a batch, and their scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kedge.errors import RolloutError
from kedge.protocols import RewardSource, RolloutEngine
from kedge.types import PromptBatch, RewardOutput, Rollout, Sampling


def sample_responses(
    prompts: PromptBatch, engine: RolloutEngine, *, sampling: Sampling, seed: int
) -> Rollout:
    """One response per prompt row.

    Raises:
        RolloutError: the engine failed, or returned other rows or empty responses.
    """
    rollout = engine.generate(prompts, sampling=sampling, seed=seed)
    if len(rollout) != len(prompts):
        raise RolloutError(
            f"{type(engine).__name__}.generate returned {len(rollout)} rows for {len(prompts)}"
            " prompts; it must return one response per prompt row, in order"
        )
    if not rollout.ids.shape[1]:
        raise RolloutError(
            f"{type(engine).__name__}.generate returned responses without tokens; a response needs"
            " at least one token, the stop token included"
        )
    return rollout


def collect(
    prompts: PromptBatch,
    engine: RolloutEngine,
    reward_source: RewardSource,
    *,
    sampling: Sampling,
    seed: int,
    clock: Callable[[], float],
    greedy: bool = False,
    on_rollout: Callable[[Rollout], None] = lambda rollout: None,
) -> tuple[Rollout, RewardOutput, dict[str, float]]:
    """Sample and score one response per prompt row; also returns the seconds of each.

    With ``greedy`` the greedy response to each prompt is scored as well, for the baseline.
    ``on_rollout`` receives the responses before they are scored.
    """
    begin = clock()
    rollout = sample_responses(prompts, engine, sampling=sampling, seed=seed)
    on_rollout(rollout)
    sampled = clock()
    reward_output = reward_source.score(rollout)
    if greedy and reward_output.greedy_scores is None:
        reward_output = _add_greedy_scores(
            reward_output, prompts, engine, reward_source, sampling=sampling, seed=seed
        )
    times = {"time/rollout": sampled - begin, "time/reward": clock() - sampled}
    return rollout, reward_output, times


def _add_greedy_scores(
    reward_output: RewardOutput,
    prompts: PromptBatch,
    engine: RolloutEngine,
    reward_source: RewardSource,
    *,
    sampling: Sampling,
    seed: int,
) -> RewardOutput:
    """Add greedy scores; if the greedy response has no score, the group's rows become invalid."""
    _, group = prompts.group.unique(return_inverse=True)
    order = torch.arange(len(prompts), device=group.device)
    first = order.new_full((int(group.max()) + 1,), len(prompts))
    first = first.scatter_reduce(0, group, order, "amin")
    greedy_sampling = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    greedy = reward_source.score(
        engine.generate(prompts.rows(first), sampling=greedy_sampling, seed=seed)
    )
    return replace(
        reward_output,
        greedy_scores=greedy.scores[group],
        valid=reward_output.valid & greedy.valid[group],
    )
