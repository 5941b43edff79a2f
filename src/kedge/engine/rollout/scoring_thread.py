"""The thread that scores groups; those without a learning signal are replaced."""

from __future__ import annotations

import torch

from kedge.engine.rollout.collector import Sample
from kedge.engine.rollout.dynamic_sampling import uniform_rows
from kedge.engine.rollout.joining import total_times
from kedge.engine.rollout.state import SamplingState
from kedge.engine.rollout.worker import SampledGroups
from kedge.types import Rollout


class ScoringThread:
    """Scores what was sampled, all that is waiting at once.

    With dynamic sampling, a group whose scores are all equal is not done: it starts again with
    another prompt, at most as many times as there are rounds.
    """

    def __init__(self, state: SamplingState) -> None:
        self._state = state
        self._times: dict[str, float] = {}  # seconds that replaced groups took

    def run(self) -> None:
        """Score groups until the scheduler closes."""
        torch.get_num_threads()  # torch sets those of a thread when it first asks
        try:
            while sampled := self._next_sampled():
                sample = self._score(sampled)
                replaced = self._replaced(sample)
                with self._state.lock:
                    self._add(sample, {n: x.step for x in sampled for n in x.numbers}, replaced)
        finally:
            self._state.scoring = False  # the failure that ends this notifies who waits

    def _next_sampled(self) -> list[SampledGroups]:
        """Groups to score; none at the end."""
        state = self._state
        with state.lock:
            state.scoring = False
            state.changed.notify_all()
            while not (state.sampled or state.closing or state.failure):
                state.changed.wait()
            sampled = [] if state.failure else state.sampled
            state.sampled, state.scoring = [], bool(sampled)
            return sampled

    def _score(self, sampled: list[SampledGroups]) -> Sample:
        greedy = None
        if answers := [x.greedy for x in sampled if x.greedy is not None]:
            greedy = Rollout.cat(answers)
            greedy = greedy.rows(greedy.prompts.group.argsort())
        rollout, reward_output, times = self._state.collector.score(
            Rollout.cat([x.rollout for x in sampled]), greedy
        )
        return rollout, reward_output, times | total_times(x.times for x in sampled)

    def _replaced(self, sample: Sample) -> list[int]:
        """Groups of equal scores that have rounds left."""
        state, (rollout, reward_output, _) = self._state, sample
        rounds = state.collector.algorithm.resample
        if not rounds:
            return []
        uniform = rollout.prompts.group[uniform_rows(rollout, reward_output)].unique().tolist()
        return [number for number in uniform if state.prompts.turn(number) < rounds]

    def _add(self, sample: Sample, steps: dict[int, int], replaced: list[int]) -> None:
        """Add groups that are done; others start again."""
        state, (rollout, reward_output, times) = self._state, sample
        times, self._times = total_times([self._times, times]), {}
        if replaced:
            state.prompts.replace(replaced)
            state.dispatcher.give_back(replaced)
            state.work.notify_all()
            steps = {number: step for number, step in steps.items() if number not in replaced}
            if not steps:
                self._times = times
                return
            kept = ~torch.isin(rollout.prompts.group, torch.tensor(replaced))
            rows = kept.nonzero()[:, 0]
            rollout, reward_output = rollout.rows(rows), reward_output.rows(rows)
        state.add_done((rollout, reward_output, times), steps)
