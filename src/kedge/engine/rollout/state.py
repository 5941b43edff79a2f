"""What the threads of sampling as completed share: groups, weights, and what they wait for."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kedge.engine.rollout.collector import RolloutCollector, Sample
from kedge.engine.rollout.dispatch import Dispatcher
from kedge.engine.rollout.joining import GroupPrompts, SampleStore
from kedge.engine.rollout.weight_sync import WeightUpdate
from kedge.engine.rollout.worker import EngineWorker, Occupancy, SampledGroups


@dataclass(slots=True, kw_only=True, eq=False)
class SamplingState:
    """Shared state of the driver, one thread per engine, and the thread that scores.

    Everything is read and changed with ``lock`` held, except what a thread owns: an engine, and the
    worker of it that is ``busy``.

    Args:
        partial_batches: per iteration, for engines without slots.
        dispatcher: decides which groups start and which are trained on.
    """

    partial_batches: int
    dispatcher: Dispatcher
    collector: RolloutCollector = field(init=False)
    prompts: GroupPrompts = field(init=False)
    store: SampleStore = field(default_factory=SampleStore)  # scored, not trained on
    sampled: list[SampledGroups] = field(default_factory=list)  # to be scored
    scoring: bool = False
    workers: list[EngineWorker] = field(default_factory=list)
    occupancy: Occupancy = field(default_factory=Occupancy)
    newest: WeightUpdate | None = None
    # "now": engines pause between tokens; "empty": when they hold no groups
    pause: Literal["", "now", "empty"] = ""
    closing: bool = False
    failure: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    work: threading.Condition = field(init=False)  # engines wait for groups and weights
    changed: threading.Condition = field(init=False)  # others wait for engines

    def __post_init__(self) -> None:
        self.work = threading.Condition(self.lock)
        self.changed = threading.Condition(self.lock)

    @property
    def in_flight(self) -> bool:
        """Whether engines get new weights while they sample."""
        return self.dispatcher.in_flight

    @property
    def responses_per_group(self) -> int:
        """Responses that an engine samples for a group, greedy baselines included."""
        return self.prompts.rows_per_group + self.collector.algorithm.needs_greedy

    def begin(self) -> None:
        """Threads are about to start, without weights."""
        self.newest, self.failure, self.closing, self.pause = None, None, False, ""
        self.sampled, self.scoring = [], False
        for worker in self.workers:
            worker.reset()

    def close(self) -> None:
        """Ask the threads to finish."""
        with self.lock:
            self.closing = True
            self._notify()

    def fail(self, error: BaseException) -> None:
        """End all threads; the driver raises the first error."""
        with self.lock:
            self.failure = self.failure or error
            self._notify()

    def _notify(self) -> None:
        self.work.notify_all()
        self.changed.notify_all()

    def drop(self, step: int) -> None:
        """Drop all groups; ``step`` starts with its first prompts."""
        self.store.clear()
        self.sampled.clear()
        self.dispatcher.clear(step)
        self.failure = None
        for worker in self.workers:
            worker.release_all()

    def wait_for_pause(self, pause: Literal["now", "empty"]) -> None:
        """Wait until no thread is at work and, with "empty", no engine holds groups."""
        self.pause = pause
        self.work.notify_all()
        while self.failure is None and self._at_work(held=pause == "empty"):
            self.changed.wait()
        if self.failure is not None:
            raise self.failure

    def _at_work(self, *, held: bool) -> bool:
        workers = any(w.busy or (held and w.held) for w in self.workers)
        return bool(workers or self.scoring or self.sampled)

    def room(self, version: int) -> float:
        """How many more groups may complete with weights of ``version``, in flight."""
        if not self.in_flight:
            return math.inf
        unscored = len(self.dispatcher.running) - self.occupancy.groups
        return self.dispatcher.room(version, unscored)

    def give_back(self, worker: EngineWorker) -> None:
        """The groups of an engine are to be started again."""
        self.dispatcher.give_back(n for n in worker.held if n in self.dispatcher.running)
        worker.release_all()
        self.work.notify_all()

    def add_done(self, sample: Sample, steps: Mapping[int, int]) -> None:
        """Add scored groups and the versions of their engines."""
        self.store.add(sample)
        for number, step in steps.items():
            self.dispatcher.complete([number], step)
        self.changed.notify_all()
