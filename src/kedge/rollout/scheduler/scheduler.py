"""What both orders of sampling share: threads that sample and score, errors, and the end of a run.

One thread per rollout engine samples, another one scores, and the driver trains.  The dispatcher
says which numbers start with which weights; a subclass says what a number is, and in which order
weights are loaded.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kedge.protocols import RolloutEngine
from kedge.rollout.scheduler.collector import PendingSample, RolloutCollector
from kedge.rollout.scheduler.dispatch import Dispatcher
from kedge.rollout.scheduler.threads import on_current_gpu, working
from kedge.rollout.scheduler.weight_sync import WeightUpdate
from kedge.rollout.scheduler.worker import EngineWorker, SampledNumbers
from kedge.types import Rollout, Sample, add_times


class RolloutScheduler(ABC):
    """Supplies the samples of each iteration.

    Everything is read and changed with the lock held, except what a thread has: an engine, and the
    worker of it that is ``busy``.

    Args:
        dispatcher: decides which numbers start and which are trained on.
        threads: without them, the driver samples and scores.
    """

    collector: RolloutCollector

    def __init__(self, dispatcher: Dispatcher, *, threads: bool = True) -> None:
        self._dispatcher, self._has_threads = dispatcher, threads
        self._workers: list[EngineWorker] = []
        self._sampled: list[SampledNumbers] = []  # to be scored, in this order
        self._updates: deque[WeightUpdate] = deque()  # to be loaded
        self._step = self._until = 0  # iterations finished, and those of the run
        self._threads: list[threading.Thread] = []
        self._num_sampling = 0  # threads that sample and have not ended
        self._scoring = self._closing = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # engines wait for numbers and weights
        self._changed = threading.Condition(self._lock)  # others wait for engines

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine used from now on.

        Raises:
            ConfigError: weights cannot be updated in flight.
        """
        self.collector = collector
        self._workers = self._connect(rollouts)

    @contextmanager
    def open(self, step: int, until: int) -> Iterator[None]:
        """Context in which the iterations from ``step`` to ``until`` are sampled.

        What was sampled and not trained on is kept at the end.
        """
        self._step, self._until, self._closing, self._failure = step, until, False, None
        self._updates.clear()
        self._begin(step)
        for worker in self._workers:
            worker.reset()
        ready = threading.Event()
        calls = [(partial(self._score_all, ready), self._end_scoring)]
        calls += [(partial(self._sample_all, w), partial(self._end, w)) for w in self._workers]
        run = on_current_gpu(self._run)
        self._threads = [
            threading.Thread(target=run, args=call, name=f"rollout {n}", daemon=True)
            for n, call in enumerate(calls if self._has_threads else [])
        ]
        self._num_sampling = len(self._threads[1:])
        for thread in self._threads:
            thread.start()
            ready.wait()  # engines may change the number of torch's threads
        with working(self._threads, close=self._close, drop=partial(self._clear, 0)):
            yield

    def send(self, weight_update: WeightUpdate) -> None:
        """New weights; the samples of iterations before ``weight_update.step`` are consumed."""
        with self._lock:
            self._step = weight_update.step
            self._updates.append(weight_update)
            self._work.notify_all()
        self._work_here()

    def next_sample(self, step: int) -> Sample:
        """The sample of iteration ``step``; blocks until it is ready."""
        with self._lock:
            self._request(step)
            self._work.notify_all()
        self._work_here()
        with self._lock:
            while (samples := self._take(step)) is None:
                if self._failure is not None:
                    raise self._failure
                assert self._num_sampling, f"there is no sample of step {step}"
                self._changed.wait()
            self._work.notify_all()
        return self._join(samples, step)

    def recover_after_error(self, step: int) -> None:
        """After a failure in iteration ``step``: sampling ends, and what can be reused is kept."""
        self._close()
        for thread in self._threads:
            thread.join()
        self._step, self._failure = step, None
        self._recover(step)

    @abstractmethod
    def wait_for_syncs(self) -> None:
        """Wait until the engines have confirmed the weights that they must load."""

    def wait_until_idle(self) -> None:
        """Wait until others can use the engines; they resume at the next ``next_sample``."""
        with self._lock:
            self._wait_until_idle()

    @property
    @abstractmethod
    def in_flight(self) -> list[PendingSample]:
        """What to save of the samples not trained on; engines resume at ``next_sample``."""

    @abstractmethod
    def restore(self, samples: Sequence[PendingSample], step: int) -> None:
        """Use these samples first, as after a resume at ``step``.

        Raises:
            CheckpointError: they are not those of a run with these settings.
        """

    # What a subclass decides.  The lock is held in all that threads call but ``_sample``.

    @abstractmethod
    def _connect(self, rollouts: RolloutEngine) -> list[EngineWorker]:
        """The engines that sample."""

    @abstractmethod
    def _begin(self, step: int) -> None:
        """The threads are about to start."""

    @abstractmethod
    def _request(self, step: int) -> None:
        """The sample of ``step`` is needed."""

    @abstractmethod
    def _next_work(self, worker: EngineWorker) -> tuple[WeightUpdate | None, list[int]] | None:
        """Weights to load and numbers to start; None if the engine has nothing to do."""

    @abstractmethod
    def _sample(self, worker: EngineWorker, numbers: list[int]) -> None:
        """Start these numbers, and sample."""

    def _number(self, worker: EngineWorker, rollout: Rollout, numbers: list[int]) -> Rollout:
        """The rollout with group ids that differ from others."""
        return rollout

    @abstractmethod
    def _add(self, sampled: Sequence[SampledNumbers], sample: Sample) -> None:
        """These numbers are scored."""

    @abstractmethod
    def _take(self, step: int) -> list[Sample] | None:
        """The parts of the sample of ``step``, or None to wait."""

    def _join(self, samples: list[Sample], step: int) -> Sample:
        (sample,) = samples
        return sample

    @abstractmethod
    def _wait_until_idle(self) -> None: ...

    @abstractmethod
    def _clear(self, step: int) -> None:
        """Drop all samples; ``step`` starts with its first prompts."""

    def _recover(self, step: int) -> None:
        self._clear(step)

    # What both orders share.

    def _run(self, target: Callable[[], None], end: Callable[[], None]) -> None:
        """A thread; that it has ended is known after its failure."""
        try:
            target()
        except KeyboardInterrupt:
            pass  # the driver was interrupted first
        except BaseException as error:  # re-raised in the driver
            self._fail(error)
        finally:
            with self._lock:
                end()
                self._notify()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._notify()

    def _close(self) -> None:
        """Ask the threads to finish."""
        with self._lock:
            self._closing = True
            self._notify()

    def _notify(self) -> None:
        self._work.notify_all()
        self._changed.notify_all()

    def _work_here(self) -> None:
        """Without threads: sample and score all that can be."""
        if self._has_threads:
            return
        try:
            for worker in self._workers:
                while (work := self._next_work(worker)) is not None:
                    self._perform(worker, *work)
            while sampled := self._next_to_score():
                self._score(sampled)
        except Exception as error:  # re-raised by next_sample
            self._fail(error)

    def _sample_all(self, worker: EngineWorker) -> None:
        """The thread of an engine: samples until the scheduler closes."""
        while (work := self._wait_for_work(worker)) is not None:
            self._perform(worker, *work)

    def _end(self, worker: EngineWorker) -> None:
        worker.busy = False
        self._num_sampling -= 1
        self._give_back(worker)

    def _give_back(self, worker: EngineWorker) -> None:
        """The groups that an engine holds are to be started again."""
        self._dispatcher.give_back(n for n in worker.held if n in self._dispatcher.running)
        worker.release_all()
        self._work.notify_all()

    def _wait_for_work(self, worker: EngineWorker) -> tuple[WeightUpdate | None, list[int]] | None:
        with self._lock:
            worker.busy = False
            self._changed.notify_all()
            while (work := self._next_work(worker)) is None and not self._closing:
                self._work.wait()
            worker.busy = work is not None
            return work

    def _perform(
        self, worker: EngineWorker, update: WeightUpdate | None, numbers: list[int]
    ) -> None:
        if update is not None:
            worker.load(update)
            with self._lock:
                self._dispatcher.reload(worker.held, update.step)
                self._changed.notify_all()
        self._sample(worker, numbers)

    def _sample_rows(
        self, worker: EngineWorker, step: int, numbers: list[int], rows: Tensor | None = None
    ) -> None:
        """Sample these rows of a batch; they are scored here if scores decide what comes next."""
        assert worker.update is not None
        sample, times = None, worker.gap
        if self.collector.more:
            sample = self.collector.draw(step, worker.engine, rows)
            rollout = sample.rollout
        else:
            rollout, seconds = self.collector.sample(step, worker.engine, rows)
            times = {"time/rollout": seconds, **times}
        rollout = self._number(worker, rollout, numbers)
        sampled = SampledNumbers(
            rollout=rollout, numbers=numbers, step=worker.update.step, times=times
        )
        with self._lock:
            if sample is None:
                self._sampled.append(sampled)
            else:
                times = add_times([sample.times, times])
                self._add([sampled], replace(sample, rollout=rollout, times=times))
            self._changed.notify_all()

    def _score_all(self, ready: threading.Event) -> None:
        """The thread that scores, until nothing more can be sampled."""
        torch.get_num_threads()  # torch sets those of a thread when it first asks
        ready.set()
        while sampled := self._wait_for_sampled():
            self._score(sampled)

    def _end_scoring(self) -> None:
        self._scoring = False

    def _wait_for_sampled(self) -> list[SampledNumbers]:
        with self._lock:
            self._scoring = False
            self._changed.notify_all()
            while not self._sampled and not (self._closing and not self._num_sampling):
                self._changed.wait()
            self._scoring = bool(self._sampled)
            return self._next_to_score()

    def _next_to_score(self) -> list[SampledNumbers]:
        """Groups that are done one by one are scored together, others as they were sampled."""
        return self._sampled[: None if self._workers[0].slots else 1]

    def _score(self, sampled: list[SampledNumbers]) -> None:
        greedy = None
        if answers := [x.greedy for x in sampled if x.greedy is not None]:
            greedy = Rollout.cat(answers)
            greedy = greedy.rows(greedy.prompts.group.argsort())
        rollouts = [x.rollout for x in sampled]
        whole = rollouts[0] if len(rollouts) == 1 else Rollout.cat(rollouts)
        sample = self.collector.score(whole, greedy)
        times = add_times([sample.times, *(x.times for x in sampled)])
        with self._lock:
            del self._sampled[: len(sampled)]
            self._add(sampled, replace(sample, times=times))
            self._changed.notify_all()

    def _wait_while(self, at_work: Callable[[], object]) -> None:
        """Wait with the lock; raises the failure that ends all work."""
        while self._failure is None and at_work():
            self._changed.wait()
        if self._failure is not None:
            raise self._failure
