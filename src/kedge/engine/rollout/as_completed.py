"""Trains on partial batches as soon as they are done, without waiting for the longest response.

A batch is split into partial batches of whole groups.  Each worker (one per engine) samples the
next one with the newest weights, and an iteration takes those finished first, so that a long
response delays only its own partial batch.  What is trained on therefore depends on timing.

The staleness bound does not.  A partial batch started with the weights of iteration ``v`` must be
trained on by step ``v + max_lag``.  Two rules guarantee this, with ``K`` partial batches per step:

    start   number n starts only if n < (newest iteration + max_lag + 1) K
    take    of those due by step t, at most (t - s) K are left after step s, for every t

A step waits for partial batches that the second rule requires; none is dropped.  Compare the
admission rule of AReaL (arXiv:2505.24298, section 5.1).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from torch import Tensor

from kedge.engine.rollout.collector import (
    LockedRewardSource,
    PendingSample,
    RolloutCollector,
    Sample,
)
from kedge.engine.rollout.joining import joined, split_groups
from kedge.engine.rollout.threads import working
from kedge.engine.rollout.weight_sync import WeightUpdate, verify_sync
from kedge.errors import CheckpointError, ConfigError, SyncError
from kedge.protocols import RolloutEngine
from kedge.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialBatch:
    """Part of a batch: in progress, or done if it has a sample."""

    number: int  # counts over the run; has prompts of step ``number // K``
    since: int  # iterations finished when it started
    sample: Sample | None = None


@dataclass(slots=True, kw_only=True)
class _EngineWorker:
    """One engine and the weights it has loaded."""

    engine: RolloutEngine
    fingerprint: str = ""
    version: int = -1
    moves: int = 0


def num_workers(rollouts: RolloutEngine) -> tuple[RolloutEngine, ...]:
    """The engines that can sample concurrently: the parts of a composite engine, or the engine."""
    return tuple(getattr(rollouts, "engines", ())) or (rollouts,)


def chosen(
    done: Sequence[PartialBatch],
    running: Sequence[PartialBatch],
    *,
    step: int,
    max_lag: int,
    per_step: int,
) -> list[PartialBatch] | None:
    """The partial batches to train on now, or None to wait.

    Args:
        done: finished ones, in the order in which they finished.
        running: those in progress.
        step: the iteration that takes them.
        max_lag: each must be trained on by step ``since + max_lag``.
        per_step: partial batches per iteration.
    """
    picked: list[PartialBatch] = []
    for later in range(max_lag + 1):
        due = [p for p in done if p.since + max_lag <= step + later]
        due_running = sum(p.since + max_lag <= step + later for p in running)
        required = len(due) + due_running - later * per_step
        free = [p for p in due if p not in picked]
        missing = required - (len(due) - len(free))
        if missing > len(free):
            return None
        picked += free[: max(0, missing)]
    picked += [p for p in done if p not in picked][: per_step - len(picked)]
    return picked if len(picked) == per_step else None


@dataclass(slots=True)
class AsCompletedScheduler:
    """Partial batches in the order in which they finish, none older than ``max_lag``.

    Args:
        partial_batches: number per iteration; must divide its prompts.
        max_lag: iterations that sampling may be ahead of training, at least 1.
    """

    partial_batches: int
    max_lag: int
    collector: RolloutCollector = field(init=False)
    _done: list[PartialBatch] = field(default_factory=list, init=False)
    _running: list[PartialBatch] = field(default_factory=list, init=False)
    _next: int = field(default=0, init=False)
    _end: int = field(default=0, init=False)
    _newest: WeightUpdate | None = field(default=None, init=False)
    _paused: bool = field(default=False, init=False)
    _closing: bool = field(default=False, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _workers: list[_EngineWorker] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.max_lag < 1:
            raise ConfigError(
                f'rollout_schedule="as_completed" needs max_lag of at least 1, got {self.max_lag}'
            )

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine, which samples with one thread per worker."""
        self.collector = replace(collector, reward=LockedRewardSource(collector.reward))
        if [worker.engine for worker in self._workers] != list(num_workers(rollouts)):
            self._workers = [_EngineWorker(engine=engine) for engine in num_workers(rollouts)]

    @contextmanager
    def open(self, step: int, until: int) -> Iterator[None]:
        """Context in which to sample; finished partial batches are kept at the end."""
        self._next = max(self._next, step * self.partial_batches)
        self._end = until * self.partial_batches
        self._newest, self._failure, self._closing, self._paused = None, None, False, False
        threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"rollout {n}", daemon=True)
            for n, worker in enumerate(self._workers)
        ]
        for thread in threads:
            thread.start()
        with working(threads, close=self._close, drop=self._drop):
            yield

    def _close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _drop(self) -> None:
        """Drop all partial batches; the next step starts with its first prompts."""
        self._done, self._running, self._next, self._failure = [], [], 0, None

    def send(self, weight_update: WeightUpdate) -> None:
        """Start every partial batch from now on with these weights."""
        with self._changed:
            self._newest = weight_update
            self._changed.notify_all()

    def next_sample(self, step: int) -> Sample:
        """The sample of iteration ``step``; blocks until it is ready."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()
            while (picked := self._pick(step)) is None:
                self._changed.wait()
            self._done = [p for p in self._done if p not in picked]
        samples = [p.sample for p in sorted(picked, key=lambda p: p.number) if p.sample]
        rollout, reward_output, times = joined(samples, self.collector.source.batch(step))
        for name in times:
            if name.startswith("time/"):
                times[name] /= len(self._workers)
        return rollout, reward_output, times

    def _pick(self, step: int) -> list[PartialBatch] | None:
        if self._failure is not None:
            raise self._failure
        picked = chosen(
            self._done,
            self._running,
            step=step,
            max_lag=self.max_lag,
            per_step=self.partial_batches,
        )
        if picked is None and not self._running and self._next >= self._bound():
            raise RuntimeError(
                f"step {step} waits for partial batches that are not being sampled:"
                f" {len(self._done)} are done and {self._next} started, with"
                f" {self.partial_batches} per step and max_lag={self.max_lag}"
            )
        return picked

    def _bound(self) -> int:
        """How many partial batches of the run may have started by now."""
        if self._newest is None:
            return self._next + 1  # waits for the first weights
        return min(self._end, (self._newest.step + self.max_lag + 1) * self.partial_batches)

    def mark_consumed(self) -> None:
        """Does nothing: a sample leaves the scheduler when it is taken."""

    def recover_after_error(self, step: int) -> None:
        """After a failure in ``step``: drop everything and restart with the prompts of ``step``."""
        self._close()
        with self._changed:
            while self._running:
                self._changed.wait()
            self._drop()
            self._next = step * self.partial_batches

    def wait_for_syncs(self) -> None:
        """Does nothing: workers verify each sync before they sample."""

    @property
    def in_flight(self) -> list[PendingSample]:
        """Samples not trained on yet; pauses sampling until the next ``next_sample``."""
        with self._changed:
            self._paused = True
            while self._running and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            return [p.sample for p in self._done if p.sample]

    def restore(self, samples: list[PendingSample], step: int) -> None:
        """Use these samples first, as after a resume at ``step``.

        Raises:
            CheckpointError: their size is not that of this run, or they are too old.
        """
        restored = []
        for n, sample in enumerate(samples):
            if isinstance(sample, Rollout):
                raise CheckpointError(
                    f"the checkpoint has {len(samples)} unscored batches of another"
                    " rollout_schedule: resume with the same rollout_schedule"
                )
            version = sample[0].version
            known = version[version >= 0]
            since = int(known.min()) if len(known) else step
            restored.append(
                PartialBatch(number=step * self.partial_batches + n, since=since, sample=sample)
            )
        size = len(self.collector.source.batch(step)) // self.partial_batches
        wrong = [len(p.sample[0]) for p in restored if p.sample and len(p.sample[0]) != size]
        if wrong:
            raise CheckpointError(
                f"samples in the checkpoint must be partial batches of {size} responses, got"
                f" {wrong[0]}: resume with the same rollout_schedule and num_partial_batches"
            )
        for later in range(self.max_lag + 1):
            due = sum(p.since + self.max_lag <= step + later for p in restored)
            overdue = any(p.since + self.max_lag < step for p in restored)
            if due > (later + 1) * self.partial_batches or overdue:
                raise CheckpointError(
                    f"samples in the checkpoint are too old for max_lag={self.max_lag}: resume"
                    " with the same max_lag"
                )
        self._done, self._next = restored, step * self.partial_batches + len(restored)

    # -- in the worker threads --------------------------------------------------------------------

    def _serve(self, worker: _EngineWorker) -> None:
        with suppress(KeyboardInterrupt):  # the driver was interrupted first
            self._sample_on(worker)

    def _sample_on(self, worker: _EngineWorker) -> None:
        while (work := self._begin()) is not None:
            part, weights = work
            try:
                finished = replace(part, sample=self._sample(worker, part, weights))
            except BaseException as error:  # re-raised in the driver
                with self._changed:
                    self._running = [p for p in self._running if p is not part]
                    self._failure = self._failure or error
                    self._changed.notify_all()
                return
            with self._changed:
                self._running.remove(part)
                self._done.append(finished)
                self._changed.notify_all()

    def _begin(self) -> tuple[PartialBatch, WeightUpdate] | None:
        """The next partial batch and its weights, once it may start; None at the end."""
        with self._changed:
            while not (self._closing or self._failure):
                newest = self._newest
                if newest is not None and not self._paused and self._next < self._bound():
                    part = PartialBatch(number=self._next, since=newest.step)
                    self._next += 1
                    self._running.append(part)
                    return part, newest
                self._changed.wait()
        return None

    def _sample(self, worker: _EngineWorker, part: PartialBatch, newest: WeightUpdate) -> Sample:
        if worker.version != newest.version or not worker.fingerprint:
            receipt = worker.engine.load_weights(newest.weights, newest.version)
            moved = newest.moves > worker.moves and worker.fingerprint != ""
            worker.fingerprint = verify_sync(
                receipt, newest, confirmed=worker.fingerprint, moved=moved
            )
            worker.version, worker.moves = newest.version, newest.moves
        step, index = divmod(part.number, self.partial_batches)
        sample = self.collector.draw(step, worker.engine, self._rows(step, index))
        version = sample[0].version
        if bool(((version >= 0) & (version < newest.version)).any()):
            raise SyncError(
                f"{type(worker.engine).__name__} must sample with version {newest.version},"
                f" which it confirmed, but used version {int(version.min())}"
            )
        return sample

    def _rows(self, step: int, index: int) -> Tensor:
        return split_groups(self.collector.source.batch(step), self.partial_batches)[index]
