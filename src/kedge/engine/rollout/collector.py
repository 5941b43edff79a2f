"""Collects samples: prompts in, scored responses out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kedge.algorithms.base import Algorithm
from kedge.engine.rollout.dynamic_sampling import REPLACED, resample_uniform_groups, spare_step
from kedge.engine.rollout.greedy import add_greedy_scores
from kedge.engine.rollout.sampling import collect, sample_responses
from kedge.engine.seeds import seed_for
from kedge.protocols import PromptSource, RewardSource, RolloutEngine
from kedge.types import PromptBatch, RewardOutput, Rollout, Sampling

Sample = tuple[Rollout, RewardOutput, dict[str, float]]  # and seconds by name
# A Rollout is still to be scored, a PromptBatch to be sampled.
PendingSample = Sample | Rollout | PromptBatch


class LockedRewardSource:
    """A reward source that only one thread calls at a time."""

    def __init__(self, reward_source: RewardSource) -> None:
        self._reward_source, self._lock = reward_source, threading.Lock()

    def score(self, rollout: Rollout) -> RewardOutput:
        """The output of the reward source."""
        with self._lock:
            return self._reward_source.score(rollout)


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

    def draw(
        self,
        step: int,
        engine: RolloutEngine,
        rows: Tensor | None = None,
        *,
        on_rollout: Callable[[Rollout], None] = lambda rollout: None,
    ) -> Sample:
        """Responses to the prompts of ``step`` and their scores.

        Args:
            step: the iteration whose prompts to use.
            engine: the rollout engine.
            rows: int64 [n]; only these rows of the batch, in whole groups.  None: all rows.
            on_rollout: receives the responses before they are scored.
        """
        times: dict[str, float] = {}
        rounds = self.algorithm.resample

        def prompts(step: int) -> PromptBatch:
            batch = self.source.batch(step)
            return batch if rows is None else batch.rows(rows)

        def collect_batch(prompts: PromptBatch, purpose: str) -> tuple[Rollout, RewardOutput]:
            rollout, reward_output, seconds = collect(
                prompts,
                engine,
                self.reward,
                sampling=self.sampling,
                seed=seed_for(self.seed, purpose, step),
                clock=self.clock,
                greedy=self.algorithm.needs_greedy,
                on_rollout=on_rollout,
            )
            times.update({name: times.get(name, 0.0) + x for name, x in seconds.items()})
            return rollout, reward_output

        try:
            rollout, reward_output = collect_batch(prompts(step), "rollout")
            if rounds:
                rollout, reward_output, count = resample_uniform_groups(
                    rollout,
                    reward_output,
                    prompts=lambda turn: prompts(spare_step(step, turn, rounds)),
                    draw=lambda fresh, turn: collect_batch(fresh, f"rollout again {turn}"),
                    rounds=rounds,
                )
                times[REPLACED] = float(count)
        except Exception:
            self._release(engine)
            raise
        self._release(engine)
        return rollout, reward_output, times

    def sample(
        self, step: int, engine: RolloutEngine, *, on_rollout: Callable[[Rollout], None]
    ) -> tuple[Rollout, float]:
        """Responses to the prompts of ``step``, to be scored later; and seconds."""
        begin = self.clock()
        prompts, seed = self.source.batch(step), seed_for(self.seed, "rollout", step)
        try:
            rollout = sample_responses(prompts, engine, sampling=self.sampling, seed=seed)
        except Exception:
            self._release(engine)
            raise
        self._release(engine)
        on_rollout(rollout)
        return rollout, self.clock() - begin

    def score(
        self, rollout: Rollout, greedy: Rollout | None = None, *, seconds: float = 0.0
    ) -> Sample:
        """Score responses that were sampled before.

        Args:
            rollout: the responses.
            greedy: greedy responses, one per group in ascending order of their ids.
            seconds: that sampling took.
        """
        begin = self.clock()
        reward_output = self.reward.score(rollout)
        if greedy is not None:
            scores = self.reward.score(greedy)
            reward_output = add_greedy_scores(reward_output, rollout.prompts, scores)
        times = {"time/rollout": seconds, "time/reward": self.clock() - begin}
        return rollout, reward_output, times

    def _release(self, engine: RolloutEngine) -> None:
        """Let the other ranks of a shared engine sample further rounds or turns."""
        wait = getattr(engine, "wait_for_other_ranks", None)
        if wait is not None and (self.more or getattr(engine, "many_turns", False)):
            wait()
