"""Prompts in, scored responses out: what the sampler's side of the loop does with a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kedge.algorithms.base import Algorithm
from kedge.engine.rollout.dynamic_sampling import REPLACED, resample_uniform_groups, spare_step
from kedge.engine.seeds import seed_for
from kedge.engine.stages import collect
from kedge.protocols import PromptSource, RewardSource, RolloutEngine
from kedge.types import PromptBatch, RewardOutput, Rollout, Sampling

Sample = tuple[Rollout, RewardOutput, dict[str, float]]  # and the seconds that it took, by name
PendingSample = Sample | Rollout  # sampled, and scored or still to be scored


class LockedRewardSource:
    """A reward source that is asked by one thread at a time, whoever asks."""

    def __init__(self, reward_source: RewardSource) -> None:
        self._judge, self._turn = reward_source, threading.Lock()

    def score(self, rollout: Rollout) -> RewardOutput:
        """What the source says."""
        with self._turn:
            return self._judge.score(rollout)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCollector:
    """Draws the samples of a step.  Pure in (weights, step, rows): no order of calls matters."""

    source: PromptSource
    reward: RewardSource
    sampling: Sampling
    algorithm: Algorithm
    seed: int
    clock: Callable[[], float] = field(repr=False)

    @property
    def more(self) -> bool:
        """Whether scores may be followed by more sampling, by some ranks and not by others."""
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
            step: the training step that the prompts belong to.
            engine: samples them.
            rows: int64 [n]; only these rows of the batch, whole groups.  None: all of them.
            on_rollout: sees responses before they are scored.
        """
        times: dict[str, float] = {}
        rounds = self.algorithm.resample

        def prompts(step: int) -> PromptBatch:
            batch = self.source.batch(step)
            return batch if rows is None else batch.rows(rows)

        def collected(prompts: PromptBatch, purpose: str) -> tuple[Rollout, RewardOutput]:
            rollout, reward_output, took = collect(
                prompts,
                engine,
                self.reward,
                sampling=self.sampling,
                seed=seed_for(self.seed, purpose, step),
                clock=self.clock,
                greedy=self.algorithm.needs_greedy,
                on_rollout=on_rollout,
            )
            times.update({name: times.get(name, 0.0) + x for name, x in took.items()})
            return rollout, reward_output

        try:
            rollout, reward_output = collected(prompts(step), "rollout")
            if rounds:
                rollout, reward_output, count = resample_uniform_groups(
                    rollout,
                    reward_output,
                    prompts=lambda turn: prompts(spare_step(step, turn, rounds)),
                    draw=lambda fresh, turn: collected(fresh, f"rollout again {turn}"),
                    rounds=rounds,
                )
                times[REPLACED] = float(count)
        except Exception:
            self._rest(engine)
            raise
        self._rest(engine)
        return rollout, reward_output, times

    def score(self, rollout: Rollout) -> Sample:
        """The sample that responses make with the scores that they get now."""
        begin = self.clock()
        reward_output = self.reward.score(rollout)
        return rollout, reward_output, {"time/rollout": 0.0, "time/reward": self.clock() - begin}

    def _rest(self, engine: RolloutEngine) -> None:
        """Let other ranks sample on, where they share the engine and some need more rounds."""
        rest = getattr(engine, "rest", None)
        if self.more and rest is not None:
            rest()
