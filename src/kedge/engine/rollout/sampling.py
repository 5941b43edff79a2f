"""Responses to the prompts of a batch, and their scores."""

from __future__ import annotations

from collections.abc import Callable

from kedge.engine.rollout.greedy import add_greedy_scores, first_rows, greedy_sampling
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
        answers = engine.generate(
            prompts.rows(first_rows(prompts)), sampling=greedy_sampling(sampling), seed=seed
        )
        reward_output = add_greedy_scores(reward_output, prompts, reward_source.score(answers))
    times = {"time/rollout": sampled - begin, "time/reward": clock() - sampled}
    return rollout, reward_output, times
