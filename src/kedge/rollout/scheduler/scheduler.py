"""Samples while the learner trains.

One thread per rollout engine samples, others score, and the driver trains.  What is sampled next,
and what an iteration trains on, is decided by its order: ``InOrder`` or ``AsCompleted``.  The
runner calls its methods with the lock held, except ``configure``, ``begin``, ``sample``, ``join``,
``recover``, and those that the driver calls while it waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from kedge.background import Stopped, check_stop, stopped_by
from kedge.records.protocols import RolloutEngine
from kedge.records.types import Rollout, Sample, add_times
from kedge.rollout.scheduler.as_completed import AsCompleted
from kedge.rollout.scheduler.collector import PendingSample, RolloutCollector
from kedge.rollout.scheduler.in_order import InOrder
from kedge.rollout.scheduler.worker import EngineWorker, SampledNumbers, WeightUpdate

PATIENCE = 5.0  # seconds to wait for a stopped thread to return from a library


class RolloutScheduler:
    """Supplies the samples of each iteration; at lag 0 the driver samples and scores itself."""

    def __init__(self, order: InOrder | AsCompleted) -> None:
        self._order, self._state = order, order.state
        self._has_threads = order.state.dispatcher.max_lag > 0
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()  # of the threads of the latest run

    @property
    def collector(self) -> RolloutCollector:
        """What samples and scores."""
        return self._state.collector

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine used from now on."""
        self._order.configure(collector, rollouts)

    @contextmanager
    def open(self, step: int, until: int) -> Iterator[None]:
        """Context in which the iterations from ``step`` to ``until`` are sampled.

        What was sampled and not trained on is kept at the end.
        """
        state, self._stop = self._state, threading.Event()
        state.step, state.until, state.closing, state.failure = step, until, False, None
        state.updates.clear()
        self._order.begin(step)
        for worker in state.workers:
            worker.reset()
        ready = threading.Event()
        calls = [(partial(self._score_all, ready), lambda: None)] * state.num_scorers
        calls += [(partial(self._sample_all, w), partial(self._end, w)) for w in state.workers]
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._threads = [
            threading.Thread(
                target=self._run, args=(*call, gpu, self._stop), name=f"rollout {n}", daemon=True
            )
            for n, call in enumerate(calls if self._has_threads else [])
        ]
        state.num_sampling = len(self._threads[state.num_scorers :])
        for thread in self._threads:
            thread.start()
            ready.wait()  # engines may change the number of torch's threads
        with self._joining():
            yield

    @contextmanager
    def _joining(self) -> Iterator[None]:
        """Context in which threads work for the driver, and are joined at the end.

        If the driver is interrupted, they stop at the next token, without results.
        """
        failure = None
        try:
            try:
                yield
            except Exception as error:
                failure = error
            self._close()
            for thread in self._threads:
                thread.join()
        except (KeyboardInterrupt, SystemExit):  # also while joining them
            self._close()
            stop(self._threads, self._stop)
            with self._state.lock:
                self._order.clear(0)
            raise
        if failure is not None:
            raise failure

    def send(self, weight_update: WeightUpdate) -> None:
        """Queue new weights; samples of iterations before ``weight_update.step`` are consumed."""
        with self._state.lock:
            self._state.step = weight_update.step
            self._state.updates.append(weight_update)
            self._state.work.notify_all()
        self._work_here()

    def next_sample(self, step: int) -> Sample:
        """The sample of iteration ``step``; blocks until it is ready."""
        return self._order.join(partial(self._take, step), step)

    def _take(self, step: int) -> list[list[Sample]]:
        """The sample of iteration ``step`` in parts, for each rank."""
        state = self._state
        with state.lock:
            self._order.request(step)
            state.work.notify_all()
        self._work_here()
        with state.lock:
            while (parts := self._order.take(step)) is None:
                if state.failure is not None:
                    raise state.failure
                assert state.num_sampling, f"there is no sample of step {step}"
                state.changed.wait()
            state.work.notify_all()
        return parts

    def recover_after_error(self, step: int) -> None:
        """Stop sampling after a failure in iteration ``step``, and keep reusable samples."""
        self._close()
        for thread in self._threads:
            thread.join()
        self._state.step, self._state.failure = step, None
        self._order.recover(step)

    def wait_for_syncs(self) -> None:
        """Wait until the engines have confirmed the weights that they must load."""
        self._order.wait_for_syncs()

    def wait_until_idle(self) -> None:
        """Wait until others can use the engines; they resume at the next ``next_sample``."""
        self._order.wait_until_idle()

    @property
    def in_flight(self) -> list[PendingSample]:
        """The state of samples not trained on yet; engines resume at ``next_sample``."""
        return self._order.in_flight()

    def restore(self, samples: Sequence[PendingSample], step: int) -> None:
        """Use these samples first, as after a resume at ``step``."""
        self._order.restore(samples, step)

    # The threads.

    def _run(
        self,
        target: Callable[[], None],
        end: Callable[[], None],
        gpu: int | None,
        stop_event: threading.Event,
    ) -> None:
        """Body of a thread; its failure is recorded before its end."""
        try:
            if gpu is not None:  # the driver's GPU; new threads default to the first
                torch.cuda.set_device(gpu)
            with stopped_by(stop_event):
                target()
        except Stopped:
            pass  # the driver was interrupted
        except BaseException as error:  # re-raised in the driver
            if not stop_event.is_set():
                self._fail(error)
        finally:
            with self._state.lock:
                if stop_event is self._stop:  # not left behind by an earlier run
                    end()
                self._state.notify()

    def _fail(self, error: BaseException) -> None:
        with self._state.lock:
            self._state.failure = self._state.failure or error
            self._state.notify()

    def _close(self) -> None:
        """Ask the threads to finish."""
        with self._state.lock:
            self._state.closing = True
            self._state.notify()

    def _work_here(self) -> None:
        """Sample and score everything that is ready in this thread, if there are no others."""
        if self._has_threads:
            return
        try:
            for worker in self._state.workers:
                while (work := self._order.next_work(worker)) is not None:
                    self._perform(worker, *work)
            while self._state.sampled:
                self._score(self._next_to_score())
        except Exception as error:  # re-raised by next_sample
            self._fail(error)

    def _sample_all(self, worker: EngineWorker) -> None:
        """The thread of an engine: samples until the scheduler closes."""
        state = self._state
        while True:
            check_stop()
            with state.lock:
                worker.busy = False
                state.changed.notify_all()
                while (work := self._order.next_work(worker)) is None and not state.closing:
                    state.work.wait()
                if work is None:
                    return
                worker.busy = True
            self._perform(worker, *work)

    def _end(self, worker: EngineWorker) -> None:
        """The thread of an engine has ended; others may sample what it held."""
        dispatcher = self._state.dispatcher
        worker.busy = False
        self._state.num_sampling -= 1
        dispatcher.give_back(n for n in worker.held if n in dispatcher.running)
        worker.release_all()

    def _perform(
        self, worker: EngineWorker, update: WeightUpdate | None, numbers: list[int]
    ) -> None:
        if update is not None:
            worker.load(update)
            with self._state.lock:
                self._state.dispatcher.reload(worker.held, update.step)
                self._state.changed.notify_all()
        self._order.sample(worker, numbers)

    def _score_all(self, ready: threading.Event) -> None:
        """Body of the scoring thread: score samples until no more can arrive."""
        torch.get_num_threads()  # torch sets the thread count of a thread at its first query
        ready.set()
        state = self._state
        while True:
            with state.lock:
                while not state.sampled and not (state.closing and not state.num_sampling):
                    state.changed.wait()
                if not state.sampled:
                    return
                sampled = self._next_to_score()
            self._score(sampled)

    def _next_to_score(self) -> list[SampledNumbers]:
        """If engines have slots a thread's share of the samples, in one call; else the first."""
        state, size = self._state, 1
        if state.workers[0].slots:
            size = -(-len(state.sampled) // state.num_scorers)
        sampled, state.sampled[:size] = state.sampled[:size], []
        state.scoring += sampled
        return sampled

    def _score(self, sampled: list[SampledNumbers]) -> None:
        state = self._state
        rollouts = [x.rollout for x in sampled]
        whole = rollouts[0] if len(rollouts) == 1 else Rollout.cat(rollouts)
        sample = state.collector.score(whole)
        check_stop()
        times = add_times([sample.times, *(x.times for x in sampled)])
        with state.lock:
            state.scoring = [x for x in state.scoring if x not in sampled]
            self._order.add(sampled, replace(sample, times=times))
            state.changed.notify_all()


def stop(
    threads: Sequence[threading.Thread], event: threading.Event, *, patience: float = PATIENCE
) -> None:
    """Stop threads that read ``event`` between tokens, and wait briefly.

    A thread stuck in a library call is left behind as a daemon.
    """
    event.set()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
