"""Reward functions and reward models in Ray actors."""

from __future__ import annotations

import logging.handlers
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kedge.ext.ray.actor import Actor
from kedge.ext.ray.pool import ActorPool
from kedge.records.errors import RewardError, RolloutError
from kedge.records.protocols import RewardSource
from kedge.records.types import RewardOutput, Rollout
from kedge.rewards.mixture import SlowCalls

logger = logging.getLogger(__name__)


class RewardActor:
    """A reward source inside an actor, made by ``make`` with options of models and functions."""

    def __init__(
        self,
        make: Callable[..., RewardSource],
        models: Mapping[str, Any],
        functions: Mapping[str, Any],
    ) -> None:
        self._state, self._notes = None, logging.handlers.BufferingHandler(capacity=100)
        logging.getLogger("kedge").addHandler(self._notes)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._source = make(
            models={**models, "device": device},
            functions={**functions, "trainer_state": lambda: self._state},
        )

    def columns(self) -> frozenset[str] | None:
        """Dataset columns that are read; None if unknown."""
        columns: frozenset[str] | None = getattr(self._source, "columns", None)
        return columns

    def score(self, rollout: Rollout, state: Any) -> tuple[RewardOutput, list[str]]:
        """The reward output, and warnings."""
        self._state = state
        output = self._source.score(rollout)
        notes = [record.getMessage() for record in self._notes.buffer]
        self._notes.flush()
        return output, notes


class RayRewards:
    """A reward source that scores in actors.

    Each worker scores a share of the batch; responses to one prompt stay together.  A worker that
    dies or hangs is restarted and repeats its share.  Several batches, such as groups that are
    completed one by one, are scored at the same time.

    ``trainer_state`` returns the value to pass to functions.
    """

    def __init__(self, pool: ActorPool, *, trainer_state: Callable[[], object]) -> None:
        self._pool, self._state = pool, trainer_state
        self.workers = pool.workers
        self.parallel = len(self.workers)
        self._slow = SlowCalls()
        self._free: queue.SimpleQueue[Actor] = queue.SimpleQueue()
        for worker in self.workers:
            self._free.put(worker)
        self.columns: frozenset[str] | None = self.workers[0].call("columns")

    def score(self, rollout: Rollout) -> RewardOutput:
        """One reward output for all rows."""
        shares = between_groups(rollout.prompts.group, len(self.workers))
        state = self._state()
        running = [
            self._pool.threads.submit(self._score, rows_of(rollout, rows), state) for rows in shares
        ]
        wait(running)
        try:
            outputs = [future.result() for future in running]
        except RolloutError as error:
            raise RewardError(str(error)) from error
        return RewardOutput.cat(outputs).to(rollout.ids.device)

    def _score(self, rollout: Rollout, state: Any) -> RewardOutput:
        """The output of a worker that is free."""
        worker = self._free.get()
        try:
            before = worker.restarts  # a restart has been logged
            slow = self._slow.report(
                worker.name, len(rollout), unless=lambda: worker.restarts > before
            )
            with slow:
                output, notes = worker.call("score", rollout, state)
        finally:
            self._free.put(worker)
        for note in notes:
            logger.warning("%s: %s", worker.name, note)
        return cast(RewardOutput, output)

    def close(self) -> None:
        """Kill the workers and release their resources."""
        self._pool.close()


def between_groups(group: Tensor, parts: int) -> list[slice]:
    """Split rows into at most ``parts`` consecutive, similar shares without splitting a group.

    All rows are one share if rows of a group (int64 [B]) are not adjacent.
    """
    rows = len(group)
    starts = [0, *(int(i) + 1 for i in (group[1:] != group[:-1]).nonzero()[:, 0])]
    if len(starts) > len(group.unique()):
        return [slice(0, rows)]
    ideals = [rows * i // parts for i in range(parts)]
    begins = sorted({min(starts, key=lambda start: abs(start - ideal)) for ideal in ideals})
    return [slice(a, b) for a, b in zip(begins, [*begins[1:], rows], strict=True)]


def rows_of(rollout: Rollout, rows: slice) -> Rollout:
    """Move rows to the CPU at unchanged width, without fields that rewards do not read."""
    return replace(rollout, allowed_tokens=None).rows(rows).to("cpu")
