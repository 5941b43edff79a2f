"""Collects samples: prompts in, scored responses out.

Scores of greedy responses are the baseline of ReMax (Li et al. 2023, arXiv:2310.10505).  Dynamic
sampling replaces groups of equal scores, whose advantage is 0, by responses to other prompts: Yu et
al. 2025 (DAPO, arXiv:2503.14476), section 3.2, samples until the batch is full; here rounds are
limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import torch
from torch import Tensor

from kedge.algorithms.base import Algorithm, uniform_rows
from kedge.records.errors import RolloutError
from kedge.records.protocols import EngineInfo, PromptSource, RewardSource, RolloutEngine, read_info
from kedge.records.seeds import seed_for
from kedge.records.types import PromptBatch, RewardOutput, Rollout, Sample, Sampling, group_rows

REPLACED = "rollout/resampled_groups"
_FIRST = 2**40  # larger than any real iteration number
# A Rollout must still be scored, a PromptBatch sampled.
PendingSample = Sample | Rollout | PromptBatch


def sample_responses(
    prompts: PromptBatch, engine: RolloutEngine, *, sampling: Sampling, seed: int
) -> Rollout:
    """Sample one response per prompt row."""
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
) -> Sample:
    """Sample and score one response per prompt row.

    With ``greedy`` the greedy response to each prompt is scored as well, for the baseline.
    """
    begin = clock()
    rollout = sample_responses(prompts, engine, sampling=sampling, seed=seed)
    sampled = clock()
    reward_output = reward_source.score(rollout)
    if greedy and reward_output.greedy_scores is None:
        most_likely = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        first = torch.stack([rows[0] for rows in group_rows(prompts)[1]])
        answers = engine.generate(prompts.rows(first), sampling=most_likely, seed=seed)
        baseline, group = reward_source.score(answers), prompts.group.unique(return_inverse=True)[1]
        reward_output = replace(
            reward_output,
            greedy_scores=baseline.scores[group],
            valid=reward_output.valid & baseline.valid[group],  # a group without baseline is lost
        )
    times = {"time/rollout": sampled - begin, "time/reward": clock() - sampled}
    return Sample(rollout=rollout, reward_output=reward_output, times=times)


def spare_step(step: int, turn: int, rounds: int) -> int:
    """The step number that selects replacement prompts for ``step`` in round ``turn``."""
    return _FIRST + step * rounds + turn


def resample_uniform_groups(
    sample: Sample,
    *,
    prompts: Callable[[int], PromptBatch],
    draw: Callable[[PromptBatch, int], Sample],
    rounds: int,
    uniform: Callable[[Rollout, RewardOutput], Tensor] = uniform_rows,
) -> Sample:
    """Replace the groups that ``uniform`` names; their number joins the ``times`` of the batch.

    ``prompts`` gives other prompts with the same groups and rows for each of at most ``rounds``
    rounds; ``draw`` samples and scores some of them.
    """
    replaced = 0
    for turn in range(rounds):
        index = uniform(sample.rollout, sample.reward_output).nonzero()[:, 0]
        if not len(index):
            break
        replaced += len(sample.rollout.prompts.group[index].unique())
        fresh = draw(prompts(turn).rows(index), turn)
        sample = sample.put_rows(index, fresh, names=("the first sampling", "a later round"))
    return replace(sample, times={**sample.times, REPLACED: float(replaced)})


class RewardPool:
    """Equal reward sources, each called by one thread at a time; the longest idle one scores."""

    def __init__(self, reward_sources: Sequence[RewardSource]) -> None:
        self.size = len(reward_sources)
        self._idle: SimpleQueue[RewardSource] = SimpleQueue()
        for reward_source in reward_sources:
            self._idle.put(reward_source)

    def score(self, rollout: Rollout) -> RewardOutput:
        """The output of one reward source."""
        reward_source = self._idle.get()
        try:
            return reward_source.score(rollout)
        finally:
            self._idle.put(reward_source)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCollector:
    """Draws the samples of an iteration.  Pure in (weights, step, rows), in any call order."""

    source: PromptSource
    reward: RewardSource
    sampling: Sampling
    algorithm: Algorithm
    seed: int
    clock: Callable[[], float] = field(repr=False)

    @property
    def more(self) -> bool:
        """Whether ranks may sample again after scoring, some of them more often than others."""
        return bool(self.algorithm.resample or self.algorithm.needs_greedy)

    def draw(self, step: int, engine: RolloutEngine) -> Sample:
        """Responses to the prompts of ``step``, and their scores."""
        rounds = self.algorithm.resample

        def collect_batch(prompts: PromptBatch, purpose: str) -> Sample:
            return collect(
                prompts,
                engine,
                self.reward,
                sampling=self.sampling,
                seed=seed_for(self.seed, purpose, step),
                clock=self.clock,
                greedy=self.algorithm.needs_greedy,
            )

        with self._wait_for_others(engine):
            sample = collect_batch(self.source.batch(step), "rollout")
            if rounds:
                sample = resample_uniform_groups(
                    sample,
                    prompts=lambda turn: self.source.batch(spare_step(step, turn, rounds)),
                    draw=lambda fresh, turn: collect_batch(fresh, f"rollout again {turn}"),
                    rounds=rounds,
                    uniform=self.algorithm.uniform,
                )
        return sample

    def sample(self, step: int, engine: RolloutEngine) -> tuple[Rollout, float]:
        """Sample responses to the prompts of ``step``, and seconds."""
        begin, seed = self.clock(), seed_for(self.seed, "rollout", step)
        with self._wait_for_others(engine):
            prompts = self.source.batch(step)
            rollout = sample_responses(prompts, engine, sampling=self.sampling, seed=seed)
        return rollout, self.clock() - begin

    def score(self, rollout: Rollout) -> Sample:
        """Score responses that were sampled before."""
        begin = self.clock()
        reward_output = self.reward.score(rollout)
        times = {"time/reward": self.clock() - begin}
        return Sample(rollout=rollout, reward_output=reward_output, times=times)

    @contextmanager
    def _wait_for_others(self, engine: RolloutEngine) -> Iterator[None]:
        """At the end, the other ranks of a shared engine may sample further rounds or turns."""
        info = read_info(engine, EngineInfo)
        wait = info.wait_for_other_ranks
        if wait is None or not (self.more or info.many_turns):
            yield
            return
        try:
            yield
        except Exception:
            wait()
            raise
        wait()
