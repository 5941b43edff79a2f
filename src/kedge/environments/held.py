"""Episodes that an engine with slots plays, each at its own pace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kedge.environments.calls import RunningCalls
from kedge.environments.episode import Episode, stack_rows
from kedge.environments.pool import EnvironmentPool
from kedge.environments.turns import environment_seed, turn_seed
from kedge.errors import LostRequestsError
from kedge.protocols import ContinuousEngine
from kedge.types import PromptBatch, Rollout, Sampling, group_rows

_SECONDS = 0.05  # to wait for environments while the engine has nothing to sample


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """An episode that is being played."""

    key: int
    group: int
    prompts: PromptBatch  # one row
    sampling: Sampling
    seed: int
    episode: Episode
    seconds: float = 0.0  # of its environment
    limit: int = 0  # tokens of the turn that is being sampled
    then: Callable[[Any], None] | None = None  # gets the answer of the environment


class HeldEpisodes:
    """A turn is a request to the engine; while environments answer, other episodes are sampled.

    Args:
        engine: samples the turns.
        environments: answer them.
        pad_id: fills prompts.
        clock: seconds.
    """

    def __init__(
        self,
        engine: ContinuousEngine,
        environments: EnvironmentPool,
        *,
        pad_id: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._environments, self._turns = engine, environments, environments.turns
        self._pad, self._clock = pad_id, clock
        self._calls: RunningCalls[int] = RunningCalls(environments.calls)
        self._next = 0  # key
        self._rows: dict[int, _Row] = {}  # by key
        self._groups: dict[int, list[_Row]] = {}  # by group id
        self._left: Counter[int] = Counter()  # running episodes of each group
        self._beginning: Counter[int] = Counter()  # of these, without their first observation
        self._seconds = (0.0, 0.0)  # in environments and in the model since groups were complete

    @property
    def unfinished(self) -> int:
        """Episodes that are being played."""
        return len(self._rows)

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        """Begin an episode for each row; environments of a group get the same seed."""
        episodes = self._environments.episodes(prompts)
        for group, index in zip(*group_rows(prompts), strict=True):
            first = int(prompts.row[index].min())
            self._beginning[group] = len(index)
            self._groups[group] = []
            for i in index.tolist():
                row = _Row(
                    key=self._next,
                    group=group,
                    prompts=prompts.rows(slice(i, i + 1)),
                    sampling=sampling,
                    seed=seed,
                    episode=episodes[i],
                )
                self._next += 1
                self._rows[row.key] = row
                self._groups[group].append(row)
                self._left[group] += 1
                begin = self._environments.begin(row.episode, environment_seed(seed, first))
                self._ask(row, begin, partial(self._began, row))

    def advance(self) -> tuple[PromptBatch, list[Episode], tuple[float, float]] | None:
        """Play on; the groups that are complete, and the seconds in environments and model.

        Raises:
            LostRequestsError: the engine was restarted, and all episodes are dropped.
            RolloutError: an environment failed, with ``on_env_error="raise"``.
        """
        begin = self._clock()
        answers = self._calls.wait(0.0 if self._engine.unfinished else _SECONDS)
        continuations = [(self._rows[key].then, result) for key, result in answers.items()]
        for key in answers:
            self._rows[key].then = None
            self._rows[key].seconds += self._calls.seconds[key]
        for then, result in continuations:
            assert then is not None  # it was asked
            then(result)
        answered = self._clock()
        if self._engine.unfinished:
            self._sample()
        in_environments, in_model = self._seconds
        in_model += self._clock() - answered
        self._seconds = in_environments + answered - begin, in_model
        return self._complete()

    def _sample(self) -> None:
        try:
            sampled = self._engine.advance()
        except LostRequestsError:
            self.drop()
            raise
        for i, key in enumerate([] if sampled is None else sampled.prompts.group.tolist()):
            assert sampled is not None
            self._take_turn(self._rows[key], sampled, i)

    def _complete(self) -> tuple[PromptBatch, list[Episode], tuple[float, float]] | None:
        done = [group for group, left in self._left.items() if not left]
        if not done:
            return None
        rows = [row for group in done for row in self._groups.pop(group)]
        for group in done:
            del self._left[group]
        seconds, self._seconds = self._seconds, (0.0, 0.0)
        prompts = PromptBatch.cat([row.prompts for row in rows])
        return prompts, [row.episode for row in rows], seconds

    def _ask(self, row: _Row, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        row.then = then
        self._calls.add(row.key, call)

    def _began(self, row: _Row, result: Any) -> None:
        self._environments.began(row.episode, result, row.sampling)
        self._beginning[row.group] -= 1
        if not self._beginning[row.group]:  # together: the engine reads an equal prompt once
            del self._beginning[row.group]
            self._next_turns(self._groups[row.group])

    def _next_turns(self, rows: Sequence[_Row]) -> None:
        """Sample another turn of rows of a group, or end their episodes."""
        live = [row for row in rows if not row.episode.done]
        for row in rows:
            if row.episode.done:
                self._environments.release(row.episode)
                del self._rows[row.key]
                self._left[row.group] -= 1
        if not live:
            return
        first = live[0]  # where there are more, all are at their first turn
        limits = [self._turns.limit(row.episode, row.sampling) for row in live]
        limit, turn = max(limits), first.episode.turns
        minimum = 0 if turn else min(first.sampling.min_new_tokens, limit)
        for row, own in zip(live, limits, strict=True):
            row.limit = own
        prompts = PromptBatch.cat([row.prompts for row in live])
        histories, keys = [row.episode.history for row in live], [row.key for row in live]
        self._engine.submit(
            stack_rows(prompts, histories, torch.tensor(keys), self._pad, limits=limits),
            sampling=replace(first.sampling, max_new_tokens=limit, min_new_tokens=minimum),
            seed=turn_seed(first.seed, turn),
        )

    def _take_turn(self, row: _Row, sampled: Rollout, i: int) -> None:
        """Give a sampled turn to the environment."""
        ids, terminated = row.episode.add_response(sampled, i, row.limit)
        response = self._turns.response(ids, terminated, row.sampling)
        step = partial(row.episode.environment.step, response)

        def stepped(result: Any) -> None:
            late = self._turns.late(row.seconds)
            last = late or row.episode.turns == self._turns.max_turns
            self._environments.stepped(
                row.episode, response, result, sampling=row.sampling, last=last
            )
            final = self._environments.final_reward(row.episode)
            if final is None:
                self._next_turns([row])
            else:
                self._ask(row, final, partial(self._ended, row))

        self._ask(row, step, stepped)

    def _ended(self, row: _Row, result: Any) -> None:
        self._environments.add_final_reward(row.episode, result)
        self._next_turns([row])

    def cancel(self) -> None:
        """Drop all episodes."""
        self.drop()
        self._engine.cancel()

    def drop(self) -> None:
        """Drop the episodes; environments that are at work are reused when they have answered."""
        rows = self._rows
        for row in rows.values():
            if row.then is None:
                self._environments.release(row.episode)

        def ended(key: int, error: BaseException | None) -> None:
            episode = rows[key].episode
            episode.error = episode.error or ("" if error is None else repr(error))
            self._environments.release(episode)

        self._calls.abandon(ended)
        self._rows = {}
        self._groups.clear()
        self._left.clear()
        self._beginning.clear()
        self._seconds = (0.0, 0.0)
