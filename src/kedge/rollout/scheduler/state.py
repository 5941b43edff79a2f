"""What the driver, the threads and the order of sampling share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from kedge.background import check_stop
from kedge.records.protocols import RolloutEngine
from kedge.records.types import Rollout, Sample, add_times
from kedge.rollout.scheduler.collector import PendingSample, RolloutCollector
from kedge.rollout.scheduler.dispatch import Dispatcher
from kedge.rollout.scheduler.joining import with_groups
from kedge.rollout.scheduler.worker import EngineWorker, SampledNumbers, WeightUpdate


@dataclass(slots=True, kw_only=True, eq=False)
class SchedulerState:
    """All of it is read and changed with ``lock`` held, except what belongs to one thread: an
    engine, and the worker of it that is ``busy``.
    """

    dispatcher: Dispatcher
    updates: deque[WeightUpdate]  # still to be loaded
    collector: RolloutCollector = field(init=False)
    workers: list[EngineWorker] = field(default_factory=list)
    sampled: list[SampledNumbers] = field(default_factory=list)  # to be scored, in this order
    scoring: list[SampledNumbers] = field(default_factory=list)  # by threads
    num_scorers: int = 1  # threads that score
    num_sampling: int = 0  # threads that sample and have not ended
    step: int = 0  # iterations finished
    until: int = 0  # iterations of the whole run
    closing: bool = False
    failure: BaseException | None = None
    lock: AbstractContextManager[bool] = field(default_factory=threading.Lock)
    work: threading.Condition = field(init=False)  # for engines that wait for groups and weights
    changed: threading.Condition = field(init=False)  # for threads that wait for engines

    def __post_init__(self) -> None:
        self.work = threading.Condition(self.lock)  # type: ignore[arg-type]
        self.changed = threading.Condition(self.lock)  # type: ignore[arg-type]

    def notify(self) -> None:
        """Wake all threads."""
        self.work.notify_all()
        self.changed.notify_all()

    def wait_while(self, at_work: Callable[[], object]) -> None:
        """Wait while holding the lock; raise the failure of any thread."""
        while self.failure is None and at_work():
            self.changed.wait()
        if self.failure is not None:
            raise self.failure

    def drop_sampled(self) -> None:
        """Forget what was sampled and not scored."""
        self.sampled.clear()
        self.scoring.clear()


class Order(Protocol):
    """Which samples are taken when: next in order, or the first that complete.

    Threads hold the lock in every call above ``sample``; it and those below take it.
    """

    state: SchedulerState

    def begin(self, step: int) -> None:
        """Prepare for the threads to start, with what is left of an earlier run."""

    def request(self, step: int) -> None:
        """The driver wants the sample of ``step``."""

    def next_work(self, worker: EngineWorker) -> tuple[WeightUpdate | None, list[int]] | None:
        """Weights to load and numbers to start; None if the engine has nothing to do."""

    def add(self, sampled: Sequence[SampledNumbers], sample: Sample) -> None:
        """Store the scored sample of these numbers."""

    def take(self, step: int) -> list[list[Sample]] | None:
        """The parts of the sample of ``step`` for each rank, or None to wait."""

    def clear(self, step: int) -> None:
        """Drop all samples; ``step`` starts with its first prompts."""

    def sample(self, worker: EngineWorker, numbers: list[int]) -> None:
        """Start these numbers, and sample."""

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine used from now on."""

    def join(self, parts: Callable[[], list[list[Sample]]], step: int) -> Sample:
        """This rank's sample of ``step``; ``parts`` returns those of all ranks."""

    def recover(self, step: int) -> None:
        """Keep what can be used after a failure in iteration ``step``; no thread runs."""

    def wait_for_syncs(self) -> None:
        """Wait until the engines have confirmed the weights that they must load."""

    def wait_until_idle(self) -> None:
        """Wait until others can use the engines."""

    def in_flight(self) -> list[PendingSample]:
        """The state of samples not trained on yet."""

    def restore(self, samples: Sequence[PendingSample], step: int) -> None:
        """Use these samples first, as after a resume at ``step``."""


def sample_rows(
    order: Order, worker: EngineWorker, step: int, numbers: list[int], rows: Tensor | None = None
) -> None:
    """Sample these rows of a batch; they are scored here if scores decide what comes next."""
    state = order.state
    assert worker.update is not None
    sample: Sample | None = None
    times = worker.gap
    rollout: Rollout
    if state.collector.more:
        sample = state.collector.draw(step, worker.engine, rows)
        rollout = sample.rollout
    else:
        rollout, seconds = state.collector.sample(step, worker.engine, rows)
        times = {"time/rollout": seconds, **times}
    check_stop()
    if rows is not None:  # a whole batch keeps the group ids of its prompts
        rollout = replace(rollout, prompts=with_groups(rollout.prompts, numbers))
        worker.check(rollout)
    sampled = SampledNumbers(rollout=rollout, numbers=numbers, step=worker.update.step, times=times)
    with state.lock:
        if sample is None:
            state.sampled.append(sampled)
        else:
            times = add_times([sample.times, times])
            order.add([sampled], replace(sample, rollout=rollout, times=times))
        state.changed.notify_all()
