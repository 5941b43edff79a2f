"""Samples while the learner trains, and trains on responses as soon as they are done.

One thread per rollout engine samples, another one scores, and the driver trains.  Engines with
slots hold many groups (the responses to one prompt) and get another one when slots become free;
other engines sample partial batches of several groups.  An iteration takes the groups that were
done first, so what is trained on depends on timing.  The staleness bound does not: the dispatcher
says which numbers start with which weights, see ``kedge.rollout.scheduler.dispatch``.

New weights reach an engine with slots when the groups that it holds are done, or at once with
in-flight weight updates: then each token has the version that sampled it.

``FifoScheduler`` takes whole batches in order instead.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.records.errors import CheckpointError, ConfigError
from kedge.records.protocols import RolloutEngine
from kedge.records.types import Rollout, Sample, add_times
from kedge.rollout.engines import RankGroups
from kedge.rollout.scheduler.collector import (
    REPLACED,
    PendingSample,
    RewardPool,
    RolloutCollector,
)
from kedge.rollout.scheduler.dispatch import Dispatcher, deal
from kedge.rollout.scheduler.joining import (
    GroupPrompts,
    SampleStore,
    join_groups,
    restore_groups,
    with_groups,
)
from kedge.rollout.scheduler.rank_rewards import RankReward, connect
from kedge.rollout.scheduler.worker import (
    EngineWorker,
    SampledNumbers,
    WeightUpdate,
    list_engines,
)

PATIENCE = 5.0  # seconds to wait for an interrupted thread to return from a library


class RolloutScheduler:
    """Supplies the samples of each iteration: groups as completed, none older than ``max_lag``.

    The dispatcher numbers groups.  With dynamic sampling, a group whose scores are all equal is not
    done: it starts again with another prompt, at most as many times as there are rounds.

    All state is read and changed with the lock held, except a thread's own: an engine, and the
    worker of it that is ``busy``.

    Args:
        partial_batches: per iteration, for engines without slots; must divide its prompts.
        max_lag: iterations that sampling may be ahead of training, at least 1.
        in_flight: engines get new weights while they sample.
        ranks: that share the engines of rank 0, which samples for all; each trains on an equal part
            of every iteration.  They make the same calls in the same order.
    """

    collector: RolloutCollector
    _source: Any  # the prompts of this rank
    _prompts: GroupPrompts

    def __init__(
        self,
        partial_batches: int,
        max_lag: int,
        *,
        in_flight: bool = False,
        ranks: RankGroups | None = None,
    ) -> None:
        if partial_batches and max_lag < 1:
            raise ConfigError(
                f'rollout_schedule="as_completed" needs max_lag of at least 1, got {max_lag}'
            )
        self._dispatcher = Dispatcher(per_step=1, max_lag=max_lag, in_flight=in_flight)
        self._partial_batches, self._ranks = partial_batches, ranks
        self._num_ranks = 1 if ranks is None else ranks.size
        self._others: list[RankReward] | None = None  # connected with the first collector
        self._has_threads = max_lag > 0  # otherwise the driver samples and scores
        self._workers: list[EngineWorker] = []
        self._sampled: list[SampledNumbers] = []  # to be scored, in this order
        self._scoring: list[SampledNumbers] = []  # by threads
        self._num_scorers = 1  # threads that score
        self._store = SampleStore()  # scored, not trained on
        self._times: dict[str, float] = {}  # of groups that were all replaced
        # Still to be loaded; with groups trained on as completed, only the newest.
        self._updates: deque[WeightUpdate] = deque(maxlen=1 if partial_batches else None)
        # "now": engines pause between tokens; "empty": when they hold no groups
        self._pause: Literal["", "now", "empty"] = ""
        self._step = self._until = 0  # iterations finished, and in the whole run
        self._threads: list[threading.Thread] = []
        self._num_sampling = 0  # threads that sample and have not ended
        self._closing = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # for engines that wait for groups and weights
        self._changed = threading.Condition(self._lock)  # for threads that wait for engines

    # The driver.

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine used from now on."""
        self.collector, self._source, source = collector, collector.source, collector.source
        self._workers, self._num_scorers = [], 0
        if self._others is None:
            self._others = [] if self._ranks is None else connect(self._ranks, self)
        if self._ranks is not None:
            if self._ranks.rank:
                return  # rank 0 samples
            source = self._source.whole()
        own = [collector.reward] * getattr(collector.reward, "parallel", 1)
        pool = RewardPool([*own, *self._others])
        self._num_scorers = pool.size
        self.collector = replace(collector, source=source, reward=pool)
        self._workers = [
            EngineWorker(engine=e, slots=getattr(e, "slots", 0)) for e in list_engines(rollouts)
        ]
        ready = all(
            w.slots and getattr(w.engine, "updates_in_flight", False) for w in self._workers
        )
        if self._dispatcher.in_flight and not ready:
            raise ConfigError(
                "in_flight_weight_updates=True needs a rollout engine that gets weights while it"
                f" holds single requests, but {type(rollouts).__name__} does not (vLLM: not with an"
                " adapter or vllm_sleep, and only from 0.32 on); leave it out"
            )

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
        calls = [(partial(self._score_all, ready), lambda: None)] * self._num_scorers
        calls += [(partial(self._sample_all, w), partial(self._end, w)) for w in self._workers]
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._threads = [
            threading.Thread(target=self._run, args=(*call, gpu), name=f"rollout {n}", daemon=True)
            for n, call in enumerate(calls if self._has_threads else [])
        ]
        self._num_sampling = len(self._threads[self._num_scorers :])
        for thread in self._threads:
            thread.start()
            ready.wait()  # engines may change the number of torch's threads
        with join_at_end(self._threads, close=self._close, drop=partial(self._clear, 0)):
            yield

    def send(self, weight_update: WeightUpdate) -> None:
        """Queue new weights; samples of iterations before ``weight_update.step`` are consumed."""
        with self._lock:
            self._step = weight_update.step
            self._updates.append(weight_update)
            self._work.notify_all()
        self._work_here()

    def next_sample(self, step: int) -> Sample:
        """The sample of iteration ``step``; blocks until it is ready."""
        if self._ranks is None:
            return self._join(self._deal(step)[0], step)
        samples = self._ranks.scatter(lambda: self._deal(step))
        return join_groups(samples, self._source.batch(step))

    def _deal(self, step: int) -> list[list[Sample]]:
        """The sample of iteration ``step`` in parts, for each rank."""
        with self._lock:
            self._request(step)
            self._work.notify_all()
        self._work_here()
        with self._lock:
            while (parts := self._take(step)) is None:
                if self._failure is not None:
                    raise self._failure
                assert self._num_sampling, f"there is no sample of step {step}"
                self._changed.wait()
            self._work.notify_all()
        return parts

    def recover_after_error(self, step: int) -> None:
        """Stop sampling after a failure in iteration ``step``, and keep reusable samples."""
        self._close()
        for thread in self._threads:
            thread.join()
        self._step, self._failure = step, None
        self._recover(step)

    def wait_for_syncs(self) -> None:
        """Wait until the engines have confirmed the weights that they must load.

        Groups as completed need not wait: engines confirm weights before they sample with them.
        """

    def wait_until_idle(self) -> None:
        """Wait until others can use the engines; they resume at the next ``next_sample``."""
        with self._lock:
            self._wait_for_pause("now" if self._dispatcher.in_flight else "empty")

    @property
    def in_flight(self) -> list[PendingSample]:
        """The state of samples not trained on yet; engines resume at ``next_sample``.

        Groups that are being sampled are saved as prompts.
        """
        with self._lock:
            self._wait_for_pause("now")
            started = [*self._dispatcher.running, *self._dispatcher.returned]
            prompts = [batch for *_, batch in self._prompts.prompts(started)]
            return [*self._store.read(), *(replace(batch, columns={}) for batch in prompts)]

    def restore(self, samples: Sequence[PendingSample], step: int) -> None:
        """Use these samples first, as after a resume at ``step``."""
        if samples and self._ranks is not None and self._ranks.rank:
            raise CheckpointError(
                "the checkpoint has samples of every learner, but learners share their rollout"
                " engines: resume with the version that wrote it"
            )
        self._read_prompts(step)
        self._clear(step)
        versions, lost = restore_groups(
            samples, self._store, size=self._prompts.rows_per_group, step=step
        )
        if not self._dispatcher.restore(step, versions, lost):
            raise CheckpointError(
                f"samples in the checkpoint are too old for max_lag={self._dispatcher.max_lag}:"
                " resume with the same max_lag"
            )

    # The order of sampling.  Threads hold the lock in every call below except ``_sample``.

    def _begin(self, step: int) -> None:
        """Prepare for the threads to start."""
        self._read_prompts(step)
        self._pause = ""
        self._sampled.clear()
        self._scoring.clear()
        dispatcher = self._dispatcher
        dispatcher.give_back(list(dispatcher.running))
        dispatcher.next = max(dispatcher.next, step * dispatcher.per_step)
        dispatcher.step, dispatcher.end = step, self._until * dispatcher.per_step

    def _read_prompts(self, step: int) -> None:
        rounds = self.collector.algorithm.resample
        self._prompts = GroupPrompts(self.collector.source, step, rounds=rounds)
        self._dispatcher.per_step = self._prompts.per_step

    def _request(self, step: int) -> None:
        """Request the sample of ``step``."""
        self._pause = ""

    def _next_work(self, worker: EngineWorker) -> tuple[WeightUpdate | None, list[int]] | None:
        """Weights to load and groups to start; None if the engine has nothing to do."""
        if not self._updates or self._pause == "now" or self._closing or self._failure:
            return None
        newest = self._updates[-1]
        full = self._room(newest.step) <= 0
        changed = worker.update is None or worker.update.version != newest.version
        load = changed and (self._dispatcher.in_flight or not worker.held)
        update = newest if load else None
        numbers = [] if self._pause or full else self._start(worker, update, newest)
        if numbers or (worker.held and (update is not None or not full)):
            return update, numbers
        return None

    def _start(
        self, worker: EngineWorker, new: WeightUpdate | None, newest: WeightUpdate
    ) -> list[int]:
        """Choose groups for an engine's free slots, with its weights or those it will load."""
        dispatcher, update = self._dispatcher, new or worker.update
        assert update is not None
        if not dispatcher.may_start(update.step, newest.step):
            return []  # it completes its groups, then loads the newest weights
        limit = dispatcher.per_step // self._partial_batches
        needs_greedy = self.collector.algorithm.needs_greedy
        rows = self._prompts.rows_per_group + needs_greedy
        if worker.slots:
            free = max((worker.slots - worker.unfinished) // rows, not worker.held)
            ahead = dispatcher.startable(update.step) + len(dispatcher.running)
            limit = min(free, -(-ahead // len(self._workers)) - len(worker.held))
            # a short greedy response may be most of a group
            responses = sum(w.unfinished for w in self._workers)
            held = self._num_held if needs_greedy else responses / rows
            limit = int(min(limit, self._room(update.step) - held))
        numbers = dispatcher.start(update.step, max(limit, 0))
        worker.hold(numbers, update.version, rows)
        return numbers

    @property
    def _num_held(self) -> int:
        """Number of groups that all engines hold together."""
        return sum(len(worker.held) for worker in self._workers)

    def _room(self, version: int) -> float:
        """Number of further groups that may complete with weights of ``version``, in flight."""
        if not self._dispatcher.in_flight:
            return math.inf
        unscored = len(self._dispatcher.running) - self._num_held
        return self._dispatcher.room(version, unscored)

    def _sample(self, worker: EngineWorker, numbers: list[int]) -> None:
        """Start these groups, and sample."""
        assert worker.update is not None
        if worker.slots:
            with self._lock:
                full = not numbers and self._room(worker.update.step) <= 0
            if full:
                return
            sampled = worker.advance(numbers, self.collector, self._prompts)
            with self._lock:
                worker.count_unfinished()
                if sampled is not None:
                    worker.release(sampled.numbers)
                    self._sampled.append(sampled)
                    self._changed.notify_all()
            return
        for step, groups, rows in self._prompts.rows(numbers):
            self._sample_rows(worker, step, groups, rows)
        with self._lock:
            worker.release_all()

    def _add(self, sampled: Sequence[SampledNumbers], sample: Sample) -> None:
        """Store the scored samples of these groups."""
        versions = {number: x.step for x in sampled for number in x.numbers}
        times, self._times = add_times([self._times, sample.times]), {}
        if replaced := self._groups_to_replace(sample):
            self._prompts.replace(replaced)
            self._dispatcher.give_back(replaced)
            self._work.notify_all()
            versions = {n: version for n, version in versions.items() if n not in replaced}
            if not versions:
                self._times = times
                return
            kept = ~torch.isin(sample.rollout.prompts.group, torch.tensor(replaced))
            sample = sample.rows(kept.nonzero()[:, 0])
        self._store.add(replace(sample, times=times))
        for number, version in versions.items():
            self._dispatcher.complete([number], version)

    def _groups_to_replace(self, sample: Sample) -> list[int]:
        """Groups of equal scores that have rounds left; partial batches were drawn with theirs."""
        rounds = self.collector.algorithm.resample
        if not rounds or not self._workers[0].slots:
            return []
        uniform = self.collector.algorithm.uniform(sample.rollout, sample.reward_output)
        groups = sample.rollout.prompts.group[uniform].unique().tolist()
        return [number for number in groups if self._prompts.turn(number) < rounds]

    def _take(self, step: int) -> list[list[Sample]] | None:
        """The parts of the sample of ``step`` for each rank, or None to wait."""
        if (numbers := self._dispatcher.take(step)) is None:
            return None
        self._prompts.forget_before(step)
        if self._ranks is None:
            return [self._part(numbers)]
        tokens = {number: self._store.tokens(number) for number in numbers}
        return [self._part(dealt) for dealt in deal(tokens, self._num_ranks)]

    def _part(self, numbers: list[int]) -> list[Sample]:
        """The samples of these groups; seconds are those of one engine."""
        samples, each = self._store.take(numbers), self._num_ranks / len(self._workers)
        times = [
            {name: x * each if name.startswith("time/") else x for name, x in sample.times.items()}
            for sample in samples
        ]
        if self.collector.algorithm.resample:
            times[0][REPLACED] = float(self._prompts.pop_turns(numbers))
        return [replace(x, times=of) for x, of in zip(samples, times, strict=True)]

    def _join(self, samples: list[Sample], step: int) -> Sample:
        return join_groups(samples, self._prompts.batch(step))

    def _clear(self, step: int) -> None:
        """Drop all samples; ``step`` starts with its first prompts."""
        self._store.clear()
        self._sampled.clear()
        self._scoring.clear()
        self._dispatcher.clear(step)
        for worker in self._workers:
            worker.release_all()

    def _recover(self, step: int) -> None:
        self._clear(step)

    def _wait_for_pause(self, pause: Literal["now", "empty"]) -> None:
        """Wait until no thread is at work and, with "empty", no engine holds groups."""
        self._pause = pause
        self._work.notify_all()

        def at_work() -> bool:
            busy = any(w.busy or (pause == "empty" and w.held) for w in self._workers)
            return bool(busy or self._scoring or self._sampled)

        def wait(ranks: Sequence[None]) -> Sequence[None]:
            self._wait_while(at_work)
            return ranks

        if self._ranks is None:
            wait([])
        else:  # a failure is raised on every rank
            self._ranks.run_on_first(None, wait)

    def _wait_while(self, at_work: Callable[[], object]) -> None:
        """Wait while holding the lock; raise the failure of any thread."""
        while self._failure is None and at_work():
            self._changed.wait()
        if self._failure is not None:
            raise self._failure

    # The threads.

    def _run(self, target: Callable[[], None], end: Callable[[], None], gpu: int | None) -> None:
        """Body of a thread; its failure is recorded before its end."""
        try:
            if gpu is not None:  # the driver's GPU; new threads default to the first
                torch.cuda.set_device(gpu)
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
        """Sample and score everything that is ready in this thread, if there are no others."""
        if self._has_threads:
            return
        try:
            for worker in self._workers:
                while (work := self._next_work(worker)) is not None:
                    self._perform(worker, *work)
            while self._sampled:
                self._score(self._next_to_score())
        except Exception as error:  # re-raised by next_sample
            self._fail(error)

    def _sample_all(self, worker: EngineWorker) -> None:
        """The thread of an engine: samples until the scheduler closes."""
        while True:
            with self._lock:
                worker.busy = False
                self._changed.notify_all()
                while (work := self._next_work(worker)) is None and not self._closing:
                    self._work.wait()
                if work is None:
                    return
                worker.busy = True
            self._perform(worker, *work)

    def _end(self, worker: EngineWorker) -> None:
        worker.busy = False
        self._num_sampling -= 1
        self._dispatcher.give_back(n for n in worker.held if n in self._dispatcher.running)
        worker.release_all()

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
        if rows is not None:  # a whole batch keeps the group ids of its prompts
            rollout = replace(rollout, prompts=with_groups(rollout.prompts, numbers))
            worker.check(rollout)
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
        """Body of the scoring thread: score samples until no more can arrive."""
        torch.get_num_threads()  # torch sets the thread count of a thread at its first query
        ready.set()
        while True:
            with self._lock:
                while not self._sampled and not (self._closing and not self._num_sampling):
                    self._changed.wait()
                if not self._sampled:
                    return
                sampled = self._next_to_score()
            self._score(sampled)

    def _next_to_score(self) -> list[SampledNumbers]:
        """If engines have slots a thread's share of the samples, in one call; else the first."""
        size = -(-len(self._sampled) // self._num_scorers) if self._workers[0].slots else 1
        self._scoring += (sampled := self._sampled[:size])
        del self._sampled[:size]
        return sampled

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
            self._scoring = [x for x in self._scoring if x not in sampled]
            self._add(sampled, replace(sample, times=times))
            self._changed.notify_all()


@contextmanager
def join_at_end(
    threads: Sequence[threading.Thread], *, close: Callable[[], None], drop: Callable[[], None]
) -> Iterator[None]:
    """Context in which threads work for the driver; ``close`` asks them to finish, then joins them.

    If the driver is interrupted, they end immediately, without results, and ``drop`` is called.
    """
    failure = None
    try:
        try:
            yield
        except Exception as error:
            failure = error
        close()
        for thread in threads:
            thread.join()
    except (KeyboardInterrupt, SystemExit):  # also while joining them
        close()
        interrupt(threads)
        drop()
        raise
    if failure is not None:
        raise failure


def interrupt(threads: Sequence[threading.Thread], *, patience: float = PATIENCE) -> None:
    """Raise ``KeyboardInterrupt`` in threads, as Ctrl-C does in the main one, and wait briefly.

    It is raised between two bytecodes: a loop over tokens ends after the current token; a thread
    stuck in a library call is left behind as a daemon.
    """
    running = [thread for thread in threads if thread.is_alive()]
    exception = ctypes.py_object(KeyboardInterrupt)
    for thread in running:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), exception)
    deadline = time.monotonic() + patience
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
