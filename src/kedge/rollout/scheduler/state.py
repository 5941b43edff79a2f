"""What the driver, the threads and the order of sampling share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kedge.background import check_stop
from kedge.records.types import Sample, add_times
from kedge.rollout.scheduler.collector import RolloutCollector
from kedge.rollout.scheduler.dispatch import Dispatcher
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
    lock: threading.Lock = field(default_factory=threading.Lock)
    work: threading.Condition = field(init=False)  # for engines that wait for groups and weights
    changed: threading.Condition = field(init=False)  # for threads that wait for engines

    def __post_init__(self) -> None:
        self.work, self.changed = threading.Condition(self.lock), threading.Condition(self.lock)

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

    def sample(
        self,
        worker: EngineWorker,
        step: int,
        *,
        add: Callable[[Sequence[SampledNumbers], Sample], None],
    ) -> None:
        """Sample the batch of an iteration without the lock.

        It is scored here, and passed to ``add``, if scores decide what comes next.
        """
        assert worker.update is not None
        sample: Sample | None = None
        times = worker.gap
        if self.collector.more:
            sample = self.collector.draw(step, worker.engine)
            rollout, times = sample.rollout, add_times([sample.times, times])
        else:
            rollout, seconds = self.collector.sample(step, worker.engine)
            times = {"time/rollout": seconds, **times}
        check_stop()
        sampled = SampledNumbers(
            rollout=rollout, numbers=[step], step=worker.update.step, times=times
        )
        with self.lock:
            if sample is None:
                self.sampled.append(sampled)
            else:
                add([sampled], replace(sample, rollout=rollout, times=times))
            self.changed.notify_all()
